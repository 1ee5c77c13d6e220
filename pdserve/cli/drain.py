"""`pdserve drain`: takes a worker out of service while its requests go on elsewhere, or puts it back."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pdserve.base.config import load, option, positional
from pdserve.base.errors import NotFound, RequestError, SetupError, StaleError
from pdserve.cli.router_client import DEFAULT_BASE_URL, get_model, normal_base_url
from pdserve.cli.status import ClusterStatus, WorkerStatus
from pdserve.cli.worker_calls import WorkerCallOptions, worker_calls
from pdserve.peers.seals import Purpose
from pdserve.v1 import diagnostics_pb2 as pb

_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainConfig(WorkerCallOptions):
    """Settings of `pdserve drain`."""

    worker: str = positional("", help="id of the worker, or one of its addresses", metavar="WORKER")
    undo: bool = option(False, help="put the worker back into service")
    wait: bool = option(True, help="wait until no request is left on the worker")
    force: bool = option(False, help="drain the last ready worker of its tier, too")
    base_url: str = option(DEFAULT_BASE_URL, help="address of the router", metavar="URL")


def main(argv: Sequence[str]) -> int:
    """Drains a worker, and shows how many requests are left. Raises `PdserveError`."""
    config = load(DrainConfig, "drain", argv, description=__doc__)
    if not config.worker:
        raise SetupError("No worker given. Pass its id, as pdserve status shows it: pdserve drain WORKER.")
    base_url = normal_base_url(config.base_url)
    cluster = get_model(base_url, "/v1/cluster", ClusterStatus, config.api_key)
    worker = find_worker(cluster.workers, config.worker)
    if not (config.undo or config.force):
        require_another(cluster.workers, worker)
    asyncio.run(_drain(worker, config, base_url))
    return 0


def find_worker(workers: Sequence[WorkerStatus], name: str) -> WorkerStatus:
    """The worker with this id or address. Raises `NotFound`."""
    for worker in workers:
        if name in (worker.worker_id, worker.grpc_address, worker.http_address):
            return worker
    known = ", ".join(worker.worker_id for worker in workers) or "none"
    raise NotFound(f"No worker has the id or address {name!r}. Workers: {known}.")


def require_another(workers: Sequence[WorkerStatus], worker: WorkerStatus) -> None:
    """Raises `RequestError` when no other worker of the tier and model is ready to take the requests."""
    same = [each for each in workers if (each.tier, each.model) == (worker.tier, worker.model)]
    if not any(each.ready and each.worker_id != worker.worker_id for each in same):
        raise RequestError(
            f"{worker.worker_id} is the last ready {worker.tier} worker: its requests have nowhere to go. Start "
            f"another one, or pass --force."
        )


async def _drain(worker: WorkerStatus, config: DrainConfig, base_url: str) -> None:
    async with worker_calls(worker, config, base_url) as calls:

        async def call(*, undo: bool = False, query: bool = False) -> pb.DrainResponse:
            request = pb.DrainRequest(undo=undo, query=query)
            answer: pb.DrainResponse = await calls.send(calls.stub.Drain, Purpose.DRAIN, request)
            return answer

        answer = await call(undo=config.undo)
        if config.undo:
            print(f"{worker.worker_id} serves again.")
        elif not config.wait:
            print(f"{worker.worker_id} drains: {_count(answer.requests)} left.")
        else:
            await _until_empty(lambda: call(query=True), answer)
            print(f"{worker.worker_id} is drained. Stop it, or put it back with pdserve drain --undo.")


async def _until_empty(query: Callable[[], Awaitable[pb.DrainResponse]], answer: pb.DrainResponse) -> None:
    """Shows the number of requests whenever it changes. Raises `StaleError` when the drain is undone."""
    shown = None
    while answer.requests:
        if not answer.is_drained:
            raise StaleError("The drain was undone meanwhile: the worker serves again.")
        if answer.requests != shown:
            shown = answer.requests
            print(f"{_count(shown)} left", file=sys.stderr)
        await asyncio.sleep(_POLL_S)
        answer = await query()


def _count(requests: int) -> str:
    return f"{requests} request" if requests == 1 else f"{requests} requests"
