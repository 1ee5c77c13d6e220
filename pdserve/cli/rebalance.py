"""`pdserve rebalance`: moves running requests from decode workers that have more of them to those that have fewer."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.base.config import load, option
from pdserve.cli.router_client import DEFAULT_BASE_URL, get_model, normal_base_url
from pdserve.cli.status import ClusterStatus, WorkerStatus
from pdserve.cli.worker_calls import WorkerCallOptions, worker_calls
from pdserve.peers.seals import Purpose
from pdserve.v1 import diagnostics_pb2 as pb

_POLL_S = 0.5
#: Time in which some request must have moved, or ended.
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceConfig(WorkerCallOptions):
    """Settings of `pdserve rebalance`."""

    wait: bool = option(True, help="go on until the decode workers have equally many sequences")
    base_url: str = option(DEFAULT_BASE_URL, help="address of the router", metavar="URL")


def main(argv: Sequence[str]) -> int:
    """Balances the load, and shows how many sequences each decode worker has. Raises `PdserveError`."""
    config = load(RebalanceConfig, "rebalance", argv, description=__doc__)
    asyncio.run(_balance(normal_base_url(config.base_url), config))
    return 0


def sequences_too_many(workers: Sequence[WorkerStatus]) -> dict[str, int]:
    """Sequences that should leave each decode worker, by its id, so that all of a model have about equally many."""
    ready = [worker for worker in workers if worker.ready and worker.tier == "decode"]
    too_many = dict[str, int]()
    for model in dict.fromkeys(worker.model for worker in ready):
        own = [worker for worker in ready if worker.model == model]
        share = math.ceil(sum(worker.running for worker in own) / len(own))
        too_many |= {worker.worker_id: worker.running - share for worker in own if worker.running > share}
    return too_many


async def _balance(base_url: str, config: RebalanceConfig) -> None:
    shown, until, fewest = "", time.monotonic() + _PATIENCE_S, math.inf
    while True:
        cluster = await asyncio.to_thread(get_model, base_url, "/v1/cluster", ClusterStatus, config.api_key)
        too_many = sequences_too_many(cluster.workers)
        if (text := _described(cluster.workers)) != shown:
            shown = text
            print(shown, file=sys.stderr)
        if not too_many:
            print("The decode workers have about equally many sequences.")
            return
        if sum(too_many.values()) < fewest:
            until, fewest = time.monotonic() + _PATIENCE_S, sum(too_many.values())
        requested = await _ask(cluster.workers, too_many, config, base_url)
        if not config.wait:
            print(f"{requested} {'request' if requested == 1 else 'requests'} should leave.")
            return
        if time.monotonic() > until:
            print("No more can move: the other requests end soon, or no worker has room for them.")
            return
        await asyncio.sleep(_POLL_S)


async def _ask(
    workers: Sequence[WorkerStatus], too_many: Mapping[str, int], config: RebalanceConfig, base_url: str
) -> int:
    """Asks requests of these workers to leave. Returns how many."""
    requested = 0
    for worker in workers:
        if worker.worker_id not in too_many:
            continue
        request = pb.RebalanceRequest(num_sequences=too_many[worker.worker_id])
        async with worker_calls(worker, config, base_url) as calls:
            answer: pb.RebalanceResponse = await calls.send(calls.stub.Rebalance, Purpose.REBALANCE, request)
        requested += answer.requests
    return requested


def _described(workers: Sequence[WorkerStatus]) -> str:
    counts = [f"{worker.worker_id} {worker.running}" for worker in workers if worker.tier == "decode"]
    return f"sequences: {', '.join(counts) or 'no decode worker'}"
