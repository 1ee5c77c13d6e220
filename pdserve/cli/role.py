"""`pdserve role`: moves a worker to the other tier while it runs, with its weights and its prefix cache."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from pdserve.base.config import load, option, positional
from pdserve.base.errors import RequestError, SetupError, StaleError
from pdserve.cli.drain import find_worker
from pdserve.cli.router_client import DEFAULT_BASE_URL, get_model, normal_base_url
from pdserve.cli.status import ClusterStatus, WorkerStatus
from pdserve.cli.worker_calls import WorkerCallOptions, worker_calls
from pdserve.peers.seals import Purpose
from pdserve.peers.workers import Tier
from pdserve.v1 import diagnostics_pb2 as pb

_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleConfig(WorkerCallOptions):
    """Settings of `pdserve role`."""

    worker: str = positional("", help="id of the worker, or one of its addresses", metavar="WORKER")
    role: str = positional("", help="its new tier: prefill or decode", metavar="ROLE")
    wait: bool = option(True, help="wait until no request of the former role is left on the worker")
    force: bool = option(False, help="take the last ready decode worker, too")
    base_url: str = option(DEFAULT_BASE_URL, help="address of the router", metavar="URL")


def main(argv: Sequence[str]) -> int:
    """Changes a worker's role, and shows how many requests of the former one are left. Raises `PdserveError`."""
    config = load(RoleConfig, "role", argv, description=__doc__)
    if not config.worker or not config.role:
        raise SetupError(
            "No worker and no role given. Pass the worker's id, as pdserve status shows it, and its new tier: pdserve "
            "role WORKER decode, or pdserve role WORKER prefill."
        )
    if config.role not in get_args(Tier):
        raise SetupError(f"{config.role!r} is no tier. Pass prefill or decode, as in pdserve role WORKER decode.")
    base_url = normal_base_url(config.base_url)
    cluster = get_model(base_url, "/v1/cluster", ClusterStatus, config.api_key)
    worker = find_worker(cluster.workers, config.worker)
    if not config.force:
        require_decode_worker(cluster.workers, worker, config.role)
    asyncio.run(_change(worker, config, base_url))
    return 0


def require_decode_worker(workers: Sequence[WorkerStatus], worker: WorkerStatus, role: str) -> None:
    """Raises `RequestError` when no other decode worker is ready. Without prefill workers, decode workers prefill."""
    decode = [each for each in workers if each.ready and (each.tier, each.model) == ("decode", worker.model)]
    others = [each for each in decode if each.worker_id != worker.worker_id]
    if worker.tier == "decode" and role == "prefill" and not others:
        raise RequestError(
            f"{worker.worker_id} is the last ready decode worker: without one, no request is served. Move another "
            "worker to the decode tier first, or pass --force."
        )


async def _change(worker: WorkerStatus, config: RoleConfig, base_url: str) -> None:
    async with worker_calls(worker, config, base_url) as calls:

        async def call(*, query: bool = False) -> pb.ChangeRoleResponse:
            request = pb.ChangeRoleRequest(role=config.role, reason="operator", query=query)
            answer: pb.ChangeRoleResponse = await calls.send(calls.stub.ChangeRole, Purpose.ROLE, request)
            return answer

        answer, shown = await call(), 0
        print(f"{worker.worker_id} takes requests of the {config.role} tier.", flush=True)
        while config.wait and answer.former_requests:
            if answer.role != config.role:
                raise StaleError(f"The role was changed meanwhile: {worker.worker_id} is a {answer.role} worker again.")
            if answer.former_requests != shown:
                shown = answer.former_requests
                print(f"{shown} of its former role left", file=sys.stderr)
            await asyncio.sleep(_POLL_S)
            answer = await call(query=True)
