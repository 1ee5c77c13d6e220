"""`pdserve rebalance`: moves running requests from decode workers that have more of them to those that have fewer."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.base.config import load, option
from pdserve.base.ids import Epoch, WorkerId
from pdserve.base.shared_options import same_option
from pdserve.cli.drain import DrainConfig
from pdserve.cli.router_client import get_model, normal_base_url
from pdserve.cli.status import ClusterStatus, WorkerStatus
from pdserve.cli.up_secret import secret_of_run
from pdserve.net.rpc import mapped_rpc_errors, open_channel
from pdserve.peers.peer_tls import PeerTls, peer_tls
from pdserve.peers.seals import Purpose, Seals, receiver_name
from pdserve.peers.secret import read_secret
from pdserve.v1 import diagnostics_pb2 as pb
from pdserve.v1 import diagnostics_pb2_grpc as pb_grpc

_CALL_TIMEOUT_S = 10.0
_POLL_S = 0.5
#: Time in which some request must have moved, or ended.
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceConfig:
    """Settings of `pdserve rebalance`."""

    wait: bool = option(True, help="go on until the decode workers have equally many sequences")
    base_url: str = same_option(DrainConfig, "base_url")
    api_key: str | None = same_option(DrainConfig, "api_key")
    cluster_secret_file: str | None = same_option(DrainConfig, "cluster_secret_file")
    peer_ssl_certfile: str | None = same_option(DrainConfig, "peer_ssl_certfile")
    peer_ssl_keyfile: str | None = same_option(DrainConfig, "peer_ssl_keyfile")
    peer_ssl_ca_certs: str | None = same_option(DrainConfig, "peer_ssl_ca_certs")
    peer_ssl_server_name: str | None = same_option(DrainConfig, "peer_ssl_server_name")


def main(argv: Sequence[str]) -> int:
    """Balances the load, and shows how many sequences each decode worker has. Raises `PdserveError`."""
    config = load(RebalanceConfig, "rebalance", argv, description=__doc__)
    base_url = normal_base_url(config.base_url)
    seals = Seals(read_secret(config.cluster_secret_file) or secret_of_run(base_url))
    asyncio.run(_balance(base_url, config, seals, peer_tls(config)))
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


async def _balance(base_url: str, config: RebalanceConfig, seals: Seals, tls: PeerTls | None) -> None:
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
        requested = await _ask(cluster.workers, too_many, seals, tls)
        if not config.wait:
            print(f"{requested} {'request' if requested == 1 else 'requests'} should leave.")
            return
        if time.monotonic() > until:
            print("No more can move: the other requests end soon, or no worker has room for them.")
            return
        await asyncio.sleep(_POLL_S)


async def _ask(workers: Sequence[WorkerStatus], too_many: Mapping[str, int], seals: Seals, tls: PeerTls | None) -> int:
    """Asks requests of these workers to leave. Returns how many."""
    requested = 0
    for worker in workers:
        if worker.worker_id not in too_many:
            continue
        receiver = receiver_name(WorkerId(worker.worker_id), Epoch(worker.epoch))
        request = pb.RebalanceRequest(num_sequences=too_many[worker.worker_id])
        async with open_channel(worker.grpc_address, tls) as channel:
            with mapped_rpc_errors(f"worker {worker.worker_id}"):
                answer: pb.RebalanceResponse = await pb_grpc.DiagnosticsServiceStub(channel).Rebalance(
                    seals.seal(Purpose.REBALANCE, receiver, request), timeout=_CALL_TIMEOUT_S
                )
        requested += answer.requests
    return requested


def _described(workers: Sequence[WorkerStatus]) -> str:
    counts = [f"{worker.worker_id} {worker.running}" for worker in workers if worker.tier == "decode"]
    return f"sequences: {', '.join(counts) or 'no decode worker'}"
