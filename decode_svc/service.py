"""The decode tier's connections and gRPC methods; routes the events of each step to the requests that they concern."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, ExitStack
from typing import Any

import grpc

from decode_svc.config import DecodeConfig
from decode_svc.migration.drain import Drain
from decode_svc.migration.eviction import Eviction
from decode_svc.peer_transfers import PeerTransfers
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from decode_svc.session import DecodeSession
from decode_svc.session_events import ChoicesEnded, SessionEvent, Started
from decode_svc.start_message import job_of
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import ReceiverIdentity
from kvtransfer.handover.ticket import commit_from_proto
from pdserve.base.errors import PdserveError, RequestError, StaleError, reason_of
from pdserve.base.ids import RequestId
from pdserve.base.logs import enter_request, get_logger
from pdserve.base.trace_context import parse_traceparent
from pdserve.base.wire import error_to_wire, sampling_from_wire
from pdserve.engine.step import LayersWritten, StepOutput
from pdserve.net import rpc
from pdserve.net.admin import bound_socket
from pdserve.net.stream_server import serve_streams
from pdserve.net.streams import MessageStream, PeerLeft
from pdserve.observe.tracing.spans import Attribute
from pdserve.peers.seals import Purpose
from pdserve.peers.workers import Tier
from pdserve.v1 import common_pb2
from pdserve.v1 import decode_pb2 as pb
from pdserve.v1 import decode_pb2_grpc as pb_grpc
from pdserve.worker.serve.data_addresses import answer_data_address, answer_introduction
from pdserve.worker.serve.fixed_role import fixed_role
from pdserve.worker.serve.inboxes import Failed, Inboxes
from pdserve.worker.serve.message_limits import max_start_bytes
from pdserve.worker.serve.worker import KEEP_ALIVE_S, Worker

log = get_logger(__name__)

#: Time for which a connection may be open without a request.
_START_TIMEOUT_S = 10.0


class DecodeService(pb_grpc.DecodeServiceServicer):
    """Implements `pdserve.worker.serve.worker.TierService`."""

    name = "pdserve.v1.DecodeService"

    def __init__(self, worker: Worker, config: DecodeConfig) -> None:
        self.max_num_seqs = config.max_decoding
        self.itl_budget_s = config.itl_budget_ms / 1000
        self._lease_s = config.lease_s
        self._layer_groups = config.num_layer_groups(worker.model.layout.num_layers)
        self.scheduler = DecodeScheduler(
            worker.model.pool,
            DecodeSchedulerConfig(
                limits=worker.model.limits,
                max_num_seqs=config.max_decoding,
                max_num_batched_tokens=config.max_prompt_tokens,
                itl_budget_s=self.itl_budget_s,
                max_reserved_share=config.max_reserved_share,
                # On a GPU, steps with several tokens of a sequence are launched kernel by kernel.
                appends_forced=config.device == "cpu",
            ),
        )
        self._worker = worker
        self._inboxes: Inboxes[SessionEvent] = Inboxes(worker.metrics.stale)
        #: Sessions that commits may come for.
        self._sessions: dict[RequestId, DecodeSession] = {}
        #: Connections with a request.
        self._streams: set[MessageStream[pb.DecodeRequest]] = set()
        self._receiver: Receiver | None = None
        interval_s = config.replication_interval_ms / 1000
        self._peers = PeerTransfers(worker, self.scheduler, self._inboxes, lambda: self.receiver, interval_s=interval_s)
        self._drain = Drain(worker, self.scheduler.migrating, self._inboxes)
        self._eviction = Eviction(worker, self.scheduler.migrating, self._inboxes)
        self._config = config
        self._open = AsyncExitStack()

    # TierService
    def register(self, server: grpc.aio.Server) -> None:
        """Adds the gRPC methods."""
        pb_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def start(self, grpc_address: str) -> str:
        """Opens the receiver, whose tickets name the address for commits, and listens for routers."""
        worker = self._worker
        identity = ReceiverIdentity(
            worker_id=worker.worker_id,
            epoch=worker.epoch,
            grpc_address=grpc_address,
            layout=worker.model.layout,
            layer_groups=self._layer_groups,
            data_endpoint=worker.paths.own_endpoint(),
        )
        self._receiver = Receiver(
            transport=worker.transport, memory=worker.blocks, identity=identity, tasks=worker.tasks
        )
        worker.tasks.start(self._keep_alive(), name="keep-alives")
        worker.metrics.num_receiving = lambda: self.receiver.num_transfers
        self._peers.replication.start()
        listener = bound_socket(self._config.host, self._config.stream_port, flag="--stream-port")
        return await self._open.enter_async_context(
            serve_streams(
                listener,
                pb.DecodeRequest.FromString,
                self._decode,
                lambda error: pb.DecodeResponse(failed=error_to_wire(error)),
                worker.tls,
                max_message_bytes=max_start_bytes(worker.model),
            )
        )

    def on_step(self, output: StepOutput) -> None:
        """Passes a step's events to their requests, in order."""
        events = output.events
        for grant in events.grants:
            self._inboxes.put(grant.request_id, grant.attempt, grant)
        started_at = _now() - output.durations.total_s
        for started in events.started:
            self._inboxes.put(started.request_id, started.attempt, Started(started, started_at))
        for progress in events.progress:
            self._inboxes.put(progress.request_id, progress.attempt, progress)
        for tokens in events.tokens:
            self._inboxes.put(tokens.request_id, tokens.attempt, tokens)
        for failure in events.failures:
            self._inboxes.put(failure.request_id, failure.attempt, Failed(error=failure.error))
        for attempt_id in events.finished:
            self._inboxes.put(*attempt_id, ChoicesEnded())
        self._eviction.after_step(output)
        self._peers.replication.after_step(output)

    def drain(self, within_s: float) -> None:
        """Hands back waiting requests, and asks running ones that would not end within half of `within_s` to move."""
        self._drain.start(within_s)

    def stay(self) -> None:
        """Takes back `drain`. Moves that have begun go on."""
        self._drain.stop()

    async def rebalance(self, num_sequences: int) -> int:
        """Asks the requests with the most tokens left to leave."""
        return await self._eviction.rebalance(num_sequences)

    def take_role(self, tier: Tier) -> None:
        """Raises: RequestError, since this service has only its own tier."""
        raise fixed_role("decode")

    def give_up(self, error: PdserveError) -> None:
        """Ends the requests that are still here with this error."""
        self._inboxes.fail_all(error)

    def on_layers(self, written: LayersWritten) -> None:
        """Never called: plans of this tier request no reports."""

    def end_idle(self) -> None:
        """Does nothing: each call of this tier has sequences, so none is idle."""

    async def close(self) -> None:
        """Closes the connections of routers, then the transfers into this worker."""
        await self._open.aclose()
        await self._peers.close()
        if self._receiver is not None:
            await self._receiver.close()

    async def _decode(self, stream: MessageStream[pb.DecodeRequest]) -> None:
        """Serves one connection: one request's life on this worker."""
        with ExitStack() as stack:
            stack.enter_context(self._worker.calls.serving("decode"))
            start = await self._start_of(stream)
            self._streams.add(stream)
            stack.callback(self._streams.discard, stream)
            request_id = RequestId(start.ref.request_id)
            caller = parse_traceparent(start.traceparent)
            enter_request(request_id, caller)
            async with self._inboxes.open(request_id, start.ref.attempt) as inbox:
                session = DecodeSession(self._worker, self.scheduler, self._peers, inbox, stream, lease_s=self._lease_s)
                session.trace.join(self._worker.tracer, caller)
                enter_request(request_id, session.trace.context)
                self._sessions[request_id] = session
                failure: str | None = None
                try:
                    params = sampling_from_wire(start.sampling)
                    grammar = await self._worker.grammars.get(params)
                    await session.run(job_of(self._worker, start, params, grammar))
                except PdserveError as error:
                    failure = reason_of(error)
                    raise
                finally:
                    del self._sessions[request_id]
                    session.trace.end(self._attributes(start), failure)

    async def _keep_alive(self) -> None:
        """Has every connection carry something each second, as long as the step thread makes progress."""
        message = pb.DecodeResponse(keep_alive=common_pb2.KeepAlive())
        while True:
            await asyncio.sleep(KEEP_ALIVE_S / 2)
            if not self._worker.is_hung:
                for stream in self._streams:
                    stream.keep_alive(message)

    def _attributes(self, start: pb.DecodeStart) -> dict[str, Attribute]:
        return {
            "pdserve.request_id": start.ref.request_id,
            "pdserve.attempt": start.ref.attempt,
            "pdserve.worker": self._worker.worker_id,
            "pdserve.prompt_tokens": len(start.prompt_token_ids),
        }

    async def _start_of(self, stream: MessageStream[pb.DecodeRequest]) -> pb.DecodeStart:
        try:
            first = await stream.read(_START_TIMEOUT_S)
        except TimeoutError:
            raise RequestError(
                f"No request came within {_START_TIMEOUT_S:g} s of connecting. Send start as the first message."
            ) from None
        if first is None:
            raise PeerLeft
        if (kind := first.WhichOneof("command")) != "start":
            raise RequestError(f"The stream starts with {kind or 'an empty message'}. Send start as its first message.")
        start = self._worker.seals.open(Purpose.START, self._worker.seal_name, first.start)
        stream.trust()
        return start

    # DecodeService
    @rpc.method
    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:  # noqa: N802
        """Verifies a transfer that is complete, and lets its sequences run."""
        metrics = self._worker.metrics
        try:
            commit = commit_from_proto(self._worker.seals.open(Purpose.COMMIT, self._worker.seal_name, request))
            taker = self._sessions.get(commit.request_id) or self._peers.copies.of(commit.request_id)
            if taker is None:
                raise StaleError(f"Request {commit.request_id} is not on this worker. It has ended, or was never here.")
            received = await taker.commit(commit)
        except PdserveError as error:
            metrics.ended(reason_of(error))
            metrics.stale("commit", error)
            log.warning("commit_refused", reason=error)
            raise
        transport = self._worker.transport.name
        metrics.received(received.received_bytes, received.received_blocks, received.receive_s, transport)
        return pb.CommitResponse(receive_s=received.receive_s)

    @rpc.method
    async def Replicate(self, request: pb.ReplicateRequest, context: Any) -> pb.ReplicateResponse:  # noqa: N802
        """Grants a ticket for copies of blocks that this worker has not cached."""
        return await self._peers.copies.reserve(request)

    @rpc.method
    async def Introduce(self, request: pb.IntroduceRequest, context: Any) -> pb.IntroduceResponse:  # noqa: N802
        """Takes data from the connections that a prefill worker names."""
        return await answer_introduction(self._worker, request)

    @rpc.method
    async def GetDataAddress(self, request: pb.GetDataAddressRequest, context: Any) -> pb.GetDataAddressResponse:  # noqa: N802
        """Opens the data address for a worker that has a ticket without it."""
        return await answer_data_address(self._worker, request)

    @property
    def receiver(self) -> Receiver:
        """Transfers into this worker."""
        assert self._receiver is not None, "requests come after start"
        return self._receiver


def _now() -> float:
    return asyncio.get_running_loop().time()
