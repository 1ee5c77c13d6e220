"""Gathers the facts about a running cluster: over HTTP from the router, over gRPC from the workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from pdserve.base.errors import Overloaded, PdserveError, PeerLost
from pdserve.base.ids import Epoch, WorkerId
from pdserve.cli.doctor.facts import ClusterFacts, PairProbe, RouterFacts, SeenWorker, choose_pairs
from pdserve.cli.status import ClusterStatus, WorkerStatus
from pdserve.net.rpc import mapped_rpc_errors, open_channel
from pdserve.observe.facts.wire import worker_from_proto
from pdserve.peers.peer_tls import PeerTls
from pdserve.peers.seals import Purpose, Seals, receiver_name
from pdserve.v1 import diagnostics_pb2 as pb
from pdserve.v1 import diagnostics_pb2_grpc as pb_grpc

#: Workers that are called for their facts; more would only repeat the same.
MAX_DESCRIBED = 64
_CONCURRENT_CALLS = 8
_DESCRIBE_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 30.0
_ROUNDS = 2
#: Attempts at a pair whose workers are busy.
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePlan:
    """How many pairs are tested, and with how many bytes each."""

    max_pairs: int
    num_bytes: int
    #: Certificates for connections to the workers; None: they speak no TLS.
    tls: PeerTls | None = None
    #: With the cluster's secret.
    seals: Seals = field(default_factory=Seals)


async def cluster_facts(status: ClusterStatus, base_url: str, plan: ProbePlan) -> ClusterFacts:
    """The facts about a cluster whose router answered `status`. Pairs are tested one after the other."""
    described = await _described(status.workers, plan)
    by_id = {worker.worker_id: worker for worker in described}
    senders, receivers = (
        [worker.worker_id for worker in described if worker.tier == tier and worker.is_ready and not worker.error]
        for tier in ("prefill", "decode")
    )
    chosen = choose_pairs(senders, receivers, plan.max_pairs)
    pairs = [await _probe(by_id[sender], by_id[receiver], plan) for sender, receiver in chosen]
    return ClusterFacts(
        router=RouterFacts(
            base_url=base_url,
            is_ready=status.router.status == "ready",
            reason=status.router.reason or "",
            degraded=status.router.degraded,
            version=status.router.version,
            has_redis=status.redis.available,
        ),
        workers=tuple(described),
        pairs=tuple(pairs),
        num_pairs=len(senders) * len(receivers),
    )


async def _described(workers: Sequence[WorkerStatus], plan: ProbePlan) -> list[SeenWorker]:
    limit = asyncio.Semaphore(_CONCURRENT_CALLS)

    async def describe(worker: WorkerStatus) -> SeenWorker:
        async with limit:
            return await _describe(worker, plan)

    called = await asyncio.gather(*map(describe, workers[:MAX_DESCRIBED]))
    return [*called, *map(_listed, workers[MAX_DESCRIBED:])]


def _listed(worker: WorkerStatus, **more: object) -> SeenWorker:
    return SeenWorker(
        worker_id=worker.worker_id,
        tier=worker.tier,
        is_ready=worker.ready,
        epoch=worker.epoch,
        grpc_address=worker.grpc_address,
        **more,  # type: ignore[arg-type] # the fields that describing adds
    )


async def _describe(worker: WorkerStatus, plan: ProbePlan) -> SeenWorker:
    request = plan.seals.seal(Purpose.DESCRIBE, _seal_name(worker), pb.DescribeRequest())
    try:
        with mapped_rpc_errors(f"worker {worker.worker_id}"):
            async with open_channel(worker.grpc_address, plan.tls) as channel:
                stub = pb_grpc.DiagnosticsServiceStub(channel)
                started = time.time()
                answer = await stub.Describe(request, timeout=_DESCRIBE_TIMEOUT_S)
                ended = time.time()
        facts = worker_from_proto(answer)
    except PdserveError as error:
        return _listed(worker, error=str(error))
    return _listed(
        worker,
        facts=facts,
        clock_skew_s=facts.unix_time_s - (started + ended) / 2,
        clock_error_s=(ended - started) / 2,
    )


def _seal_name(worker: WorkerStatus | SeenWorker) -> bytes:
    return receiver_name(WorkerId(worker.worker_id), Epoch(worker.epoch))


async def _probe(sender: SeenWorker, receiver: SeenWorker, plan: ProbePlan) -> PairProbe:
    """The faster of some rounds, or why there is none."""
    best: PairProbe | None = None
    try:
        for _ in range(_ROUNDS):
            probe = await _patient_round(sender, receiver, plan)
            if best is None or probe.bytes_per_s > best.bytes_per_s:
                best = probe
    except Overloaded:
        return best or PairProbe(prefill=sender.worker_id, decode=receiver.worker_id, is_busy=True)
    except PdserveError as error:
        return PairProbe(prefill=sender.worker_id, decode=receiver.worker_id, error=str(error))
    except TimeoutError:
        error_text = f"not through within {_PROBE_TIMEOUT_S:g} s"
        return PairProbe(prefill=sender.worker_id, decode=receiver.worker_id, error=error_text)
    assert best is not None
    return best


async def _patient_round(sender: SeenWorker, receiver: SeenWorker, plan: ProbePlan) -> PairProbe:
    """One test transfer, tried again while a worker has other things to do. Raises Overloaded in the end."""
    for attempt in range(_ATTEMPTS):
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                return await _round(sender, receiver, plan)
        except Overloaded as busy:
            if attempt == _ATTEMPTS - 1:
                raise
            await asyncio.sleep(busy.retry_after_s)
    raise AssertionError("the last attempt returns or raises")


async def next_event(events: AsyncIterator[pb.ReceiveProbeResponse], receiver: SeenWorker) -> pb.ReceiveProbeResponse:
    """The receiver's next message. Raises `PeerLost` when it sends no more."""
    async for event in events:
        return event
    raise PeerLost(f"Worker {receiver.worker_id} ended the test transfer early. See its log.")


async def _round(sender: SeenWorker, receiver: SeenWorker, plan: ProbePlan) -> PairProbe:
    async with (
        open_channel(sender.grpc_address, plan.tls) as to_sender,
        open_channel(receiver.grpc_address, plan.tls) as to_receiver,
    ):
        receiving = pb_grpc.DiagnosticsServiceStub(to_receiver).ReceiveProbe(
            plan.seals.seal(Purpose.PROBE, _seal_name(receiver), pb.ReceiveProbeRequest(num_bytes=plan.num_bytes))
        )
        try:
            with mapped_rpc_errors(f"worker {receiver.worker_id}"):
                events = aiter(receiving)
                granted = (await next_event(events, receiver)).ticket
            with mapped_rpc_errors(f"worker {sender.worker_id}"):
                request = pb.SendProbeRequest(ticket=granted.ticket, request_id=granted.request_id)
                sealed = plan.seals.seal(Purpose.PROBE, _seal_name(sender), request)
                sent = await pb_grpc.DiagnosticsServiceStub(to_sender).SendProbe(sealed)
            with mapped_rpc_errors(f"worker {receiver.worker_id}"):
                received = (await next_event(events, receiver)).received
        finally:
            receiving.cancel()
    return PairProbe(
        prefill=sender.worker_id,
        decode=receiver.worker_id,
        num_bytes=sent.num_bytes,
        bytes_per_s=sent.num_bytes / sent.wire_s if sent.wire_s else 0.0,
        memory_copy_bytes_per_s=received.memory_copy_bytes_per_s,
        expected=sent.expected,
        actual=sent.actual,
        cause=sent.cause,
        remedy=sent.remedy,
        protocol=sent.protocol,
    )
