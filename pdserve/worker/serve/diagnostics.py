"""The gRPC service for operators: facts about this worker, test transfers that disturb no request, and its drain."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import Received, ReceiverIdentity, Reservation
from kvtransfer.handover.sealed_ticket import opened_ticket, sealed_ticket
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.ticket import Commit, Ticket, commit_from_proto, commit_to_proto
from kvtransfer.transport.path import TransportPath
from pdserve.base.errors import Draining, Overloaded, PdserveError, RequestError, StaleError
from pdserve.base.ids import RequestId, TransferId, new_transfer_id
from pdserve.base.tasks import run_to_completion
from pdserve.model.fetch.cache import default_cache_dir
from pdserve.net import rpc
from pdserve.observe.facts.cluster import WorkerFacts
from pdserve.observe.facts.machine import machine_facts
from pdserve.observe.facts.redis import redis_facts
from pdserve.observe.facts.wire import worker_to_proto
from pdserve.peers.seals import Purpose, receiver_name
from pdserve.redis.store import Store
from pdserve.v1 import decode_pb2
from pdserve.v1 import diagnostics_pb2 as pb
from pdserve.v1 import diagnostics_pb2_grpc as pb_grpc
from pdserve.worker.kv_bytes.host_blocks import in_place
from pdserve.worker.serve.data_addresses import DataAddressCalls
from pdserve.worker.serve.manual_drain import ManualDrain
from pdserve.worker.serve.probe_memory import ProbeBlocks, num_probe_blocks, sharing
from pdserve.worker.serve.role_change import RoleChange
from pdserve.worker.serve.worker import Worker

#: Time after which a test transfer that makes no progress ends, and its memory is freed.
LEASE_S = 10.0
#: Pause between two test transfers of a worker.
PAUSE_S = 0.25
_NO_TOKENS = (0,)


class DiagnosticsService(pb_grpc.DiagnosticsServiceServicer):
    """Implements `pdserve.v1.DiagnosticsService` on one worker. At most one test transfer runs at a time."""

    name = "pdserve.v1.DiagnosticsService"

    def __init__(self, worker: Worker, store: Store) -> None:
        self._worker = worker
        self._store = store
        #: Set once the gRPC server listens; commits come here.
        self.grpc_address = ""
        #: Takes this worker out of service; None while it starts.
        self.manual_drain: ManualDrain | None = None
        #: Changes its role; None while it starts.
        self.role_change: RoleChange | None = None
        #: `TierService.rebalance`; None while it starts.
        self.rebalance: Callable[[int], Awaitable[int]] | None = None
        self._is_probing = False
        self._next_at = float("-inf")
        #: The test transfer into this worker.
        self._receivers: dict[TransferId, Receiver] = {}

    @rpc.method
    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:  # noqa: N802
        """The facts about this worker."""
        worker, kernels = self._worker, self._worker.model.kernels
        worker.seals.open(Purpose.DESCRIBE, worker.seal_name, request)
        machine = await asyncio.to_thread(machine_facts, [default_cache_dir()])
        redis = await redis_facts(self._store)
        return worker_to_proto(
            WorkerFacts(
                worker_id=worker.worker_id,
                tier=worker.tier,
                layout=worker.model.layout,
                transport=worker.transport.name,
                device=worker.config.device,
                kernels=kernels.backend,
                instruction_set=kernels.instruction_set,
                unix_time_s=time.time(),
                machine=machine,
                redis=redis,
            )
        )

    @rpc.method
    async def ReceiveProbe(self, request: pb.ReceiveProbeRequest, context: Any) -> None:  # noqa: N802
        """Receives one test transfer. However the call ends, its memory is quiet and freed."""
        worker, layout = self._worker, self._worker.model.layout
        request = worker.seals.open(Purpose.PROBE, worker.seal_name, request)
        with self._admitted():
            num_blocks, is_shared = num_probe_blocks(layout, request.num_bytes), worker.config.uses_local_sockets
            blocks = await asyncio.to_thread(partial(ProbeBlocks, layout, num_blocks, is_shared=is_shared))
            receiver = Receiver(
                transport=worker.transport,
                memory=in_place(blocks.memory, layout, blocks.shared),
                identity=self._identity(),
                tasks=worker.tasks,
            )
            ended: asyncio.Future[Received] = asyncio.get_running_loop().create_future()
            reservation = _reservation(blocks, len(layout.groups), ended)
            try:
                ticket = await receiver.grant(reservation, attempt=1)
                self._receivers[ticket.transfer_id] = receiver
                sealed = sealed_ticket(ticket, reservation.request_id, worker.seals)
                granted = pb.ProbeTicket(ticket=sealed, request_id=reservation.request_id)
                await context.write(pb.ReceiveProbeResponse(ticket=granted))
                received = await ended
                copy = await asyncio.to_thread(blocks.copy_bytes_per_s)
            finally:
                self._receivers.clear()
                await run_to_completion(receiver.close())
            done = pb.ProbeReceived(
                num_bytes=received.received_bytes, receive_s=received.receive_s, memory_copy_bytes_per_s=copy
            )
            await context.write(pb.ReceiveProbeResponse(received=done))

    @rpc.method
    async def CommitProbe(self, request: decode_pb2.CommitRequest, context: Any) -> decode_pb2.CommitResponse:  # noqa: N802
        """Verifies a test transfer that is complete."""
        commit = commit_from_proto(self._worker.seals.open(Purpose.COMMIT, self._worker.seal_name, request))
        receiver = self._receivers.get(commit.transfer_id)
        if receiver is None:
            raise StaleError("The test transfer is not on this worker. It has ended, or was never here.")
        received = await receiver.commit(commit)
        return decode_pb2.CommitResponse(receive_s=received.receive_s)

    @rpc.method
    async def SendProbe(self, request: pb.SendProbeRequest, context: Any) -> pb.SendProbeResponse:  # noqa: N802
        """Sends one test transfer."""
        request = self._worker.seals.open(Purpose.PROBE, self._worker.seal_name, request)
        if self._worker.tier != "prefill":
            raise RequestError("Decode workers send no blocks. Ask a prefill worker.")
        ticket = opened_ticket(request.ticket, RequestId(request.request_id), self._worker.seals)
        layout = self._worker.model.layout
        if ticket.num_blocks > num_probe_blocks(layout, ticket.num_blocks * layout.block_bytes):
            raise RequestError(f"A test transfer of {ticket.num_blocks} blocks is too large. Use a smaller one.")
        with self._admitted():
            is_shared = self._worker.config.uses_local_sockets
            blocks = await asyncio.to_thread(partial(ProbeBlocks, layout, ticket.num_blocks, is_shared=is_shared))
            with sharing(blocks.shared, self._worker.transport):
                return await self._send(blocks, ticket, RequestId(request.request_id))

    @rpc.method
    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:  # noqa: N802
        """Takes this worker out of service, or back into it."""
        request = self._worker.seals.open(Purpose.DRAIN, self._worker.seal_name, request)
        if self.manual_drain is None:
            raise Draining("The worker is still starting. Drain it when it is ready.")
        if not request.query:
            await (self.manual_drain.undo() if request.undo else self.manual_drain.start())
        return pb.DrainResponse(requests=self._worker.calls.count, is_drained=self.manual_drain.is_drained)

    @rpc.method
    async def ChangeRole(self, request: pb.ChangeRoleRequest, context: Any) -> pb.ChangeRoleResponse:  # noqa: N802
        """Moves this worker to the other tier."""
        request = self._worker.seals.open(Purpose.ROLE, self._worker.seal_name, request)
        if self.role_change is None:
            raise Draining("The worker is still starting. Change its role when it is ready.")
        if not request.query:
            await self.role_change.change(request.role, request.reason)
        return pb.ChangeRoleResponse(role=self._worker.tier, former_requests=self.role_change.former_requests)

    @rpc.method
    async def Rebalance(self, request: pb.RebalanceRequest, context: Any) -> pb.RebalanceResponse:  # noqa: N802
        """Asks requests to move to other workers."""
        request = self._worker.seals.open(Purpose.REBALANCE, self._worker.seal_name, request)
        if self.rebalance is None:
            raise Draining("The worker is still starting. It has no requests that could move.")
        return pb.RebalanceResponse(requests=await self.rebalance(request.num_sequences))

    async def _send(self, blocks: ProbeBlocks, ticket: Ticket, request_id: RequestId) -> pb.SendProbeResponse:
        """Sends over a connection of its own: whatever happens to it, the connections of prompts stay."""
        worker, paths = self._worker, list[TransportPath | None]()
        sender = Sender(
            transport=worker.transport,
            memory=in_place(blocks.memory, worker.model.layout, blocks.shared),
            layout=worker.model.layout,
            on_peer=lambda ticket, peer: paths.append(worker.paths.path_to(ticket, peer, is_in_host_memory=True)),
            calls=DataAddressCalls(worker, lambda ticket: rpc.open_channel(ticket.grpc_address, worker.tls)),
        )
        sender.close_unused()
        async with sender.open(ticket, request_id=request_id) as transfer:
            started = time.perf_counter()
            await transfer.push(blocks.block_ids)
            await transfer.finish(_NO_TOKENS, lambda commit: self._commit(ticket, commit))
            total_s, stats = time.perf_counter() - started, transfer.stats
        response = pb.SendProbeResponse(num_bytes=stats.sent_bytes, wire_s=stats.busy_s, total_s=total_s)
        if paths and (path := paths[0]) is not None:
            response.expected, response.actual = path.expected, path.actual
            response.cause, response.remedy, response.protocol = path.cause, path.remedy, path.protocol
        return response

    async def _commit(self, ticket: Ticket, commit: Commit) -> decode_pb2.CommitResponse:
        receiver = receiver_name(ticket.worker_id, ticket.epoch)
        message = self._worker.seals.seal(Purpose.COMMIT, receiver, commit_to_proto(commit))
        with rpc.mapped_rpc_errors(f"worker {ticket.worker_id}"):
            async with rpc.open_channel(ticket.grpc_address, self._worker.tls) as channel:
                stub = pb_grpc.DiagnosticsServiceStub(channel)
                answer: decode_pb2.CommitResponse = await stub.CommitProbe(message, timeout=ticket.lease_s)
                return answer

    def _identity(self) -> ReceiverIdentity:
        worker = self._worker
        endpoint = worker.paths.own_endpoint()
        return ReceiverIdentity(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            grpc_address=self.grpc_address,
            layout=worker.model.layout,
            data_endpoint=None if endpoint is None else endpoint.with_host_memory(),
        )

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        """One test transfer. Raises Overloaded when it would disturb requests, Draining while loading or draining."""
        now = time.monotonic()
        if self._is_probing or now < self._next_at:
            raise Overloaded(
                f"Worker {self._worker.worker_id} has just done a test transfer. Try again after {PAUSE_S:g} s.",
                retry_after_s=PAUSE_S,
            )
        if self._worker.calls.count:
            raise Overloaded(
                f"Worker {self._worker.worker_id} serves {self._worker.calls.count} requests. "
                "Test transfers wait until it is idle.",
                retry_after_s=PAUSE_S,
            )
        with self._worker.calls.serving():
            self._is_probing = True
            try:
                yield
            finally:
                self._is_probing = False
                self._next_at = time.monotonic() + PAUSE_S


def _reservation(blocks: ProbeBlocks, num_kv_groups: int, ended: asyncio.Future[Received]) -> Reservation:
    """All blocks are of the first KV group."""

    def on_received(received: Received) -> None:
        if not ended.done():
            ended.set_result(received)

    def on_expired(error: PdserveError) -> None:
        if not ended.done():
            ended.set_exception(error)

    return Reservation(
        request_id=RequestId(f"probe-{new_transfer_id().hex()}"),
        block_ids=(blocks.block_ids, *[()] * (num_kv_groups - 1)),
        first_blocks=(0, *[blocks.num_blocks] * (num_kv_groups - 1)),
        lease_s=LEASE_S,
        on_received=on_received,
        on_expired=on_expired,
    )
