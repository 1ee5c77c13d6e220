"""The prefill tier's gRPC method, and what each step's output means for the prompts here."""

from __future__ import annotations

import asyncio

import grpc

from kvtransfer.handover.sender import Sender
from kvtransfer.handover.ticket import Ticket, ticket_from_proto
from pdserve.base import rpc
from pdserve.base.block_hash import hash_blocks
from pdserve.base.errors import PdserveError, reason_of
from pdserve.base.ids import RequestId, RouterId
from pdserve.base.logs import get_logger, request_id_var
from pdserve.base.wire import sampling_from_wire
from pdserve.engine.step import LayersWritten, StepOutput
from pdserve.v1 import prefill_pb2 as pb
from pdserve.v1 import prefill_pb2_grpc as pb_grpc
from pdserve.worker.serve.inboxes import Failed, Inboxes
from pdserve.worker.serve.worker import Worker
from prefill_svc.config import PrefillConfig
from prefill_svc.scheduler import PrefillJob, PrefillScheduler, PrefillSchedulerConfig
from prefill_svc.session import Begun, Event, PrefillSession

log = get_logger(__name__)

#: Channels for commits, to incarnations of decode workers. The least recently used are closed beyond that.
_MAX_DECODE_CHANNELS = 64


class PrefillService(pb_grpc.PrefillServiceServicer):
    """Implements `pdserve.worker.serve.worker.TierService`."""

    name = "pdserve.v1.PrefillService"
    itl_budget_s = None

    def __init__(self, worker: Worker, config: PrefillConfig) -> None:
        # A step computes at least one token of each of its prompts.
        self.max_num_seqs = config.max_num_batched_tokens
        self.scheduler = PrefillScheduler(
            worker.model.pool,
            PrefillSchedulerConfig(limits=worker.model.limits, max_num_batched_tokens=config.max_num_batched_tokens),
        )
        self._worker = worker
        self._sessions: Inboxes[Event] = Inboxes()
        self._sender = Sender(transport=worker.transport, memory=worker.blocks, layout=worker.model.layout)
        self._channels = rpc.ChannelPool(max_kept=_MAX_DECODE_CHANNELS)

    # TierService
    def register(self, server: grpc.aio.Server) -> None:
        """Adds the gRPC method."""
        pb_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def start(self, grpc_address: str) -> str:
        """Nothing to do: prompts come over gRPC, and nobody calls a prefill worker back."""
        return ""

    def on_step(self, output: StepOutput) -> None:
        """Hands a step's events to their prompts; tokens before progress, since a client waits for them."""
        events = output.events
        durations = output.durations
        step_s = durations.schedule_s + durations.build_s + durations.forward_s + durations.sample_s
        begun = (Begun(started=started, at=_now() - step_s) for started in events.started)
        in_order: tuple[Event, ...] = (*begun, *events.tokens, *events.progress)
        for event in in_order:
            self._sessions.put(event.request_id, event)
        for failure in events.failures:
            self._sessions.put(failure.request_id, Failed(error=failure.error))

    def on_layers(self, written: LayersWritten) -> None:
        """Hands it to its prompt."""
        self._sessions.put(written.request_id, written)

    async def close(self) -> None:
        """No call is left."""
        await self._channels.close()

    # PrefillService
    @rpc.method
    async def Prefill(  # noqa: N802 - the name is the wire's
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillResponse]
    ) -> None:
        """Computes a prompt and hands it over."""
        with self._worker.calls.serving():
            request_id = RequestId(request.ref.request_id)
            request_id_var.set(request_id)
            ticket = ticket_from_proto(request.ticket) if request.HasField("ticket") else None
            async with self._sessions.open(request_id, request.ref.attempt) as inbox:
                session = PrefillSession(
                    self._worker, self.scheduler, self._sender, self._channels, inbox, context.write
                )
                try:
                    await session.run(self._job(request, ticket), ticket)
                except PdserveError as error:
                    session.outcome = reason_of(error)
                    log.warning("prefill_failed", reason=error)
                    raise
                finally:
                    if ticket is not None:
                        self._worker.metrics.ended(session.outcome)

    def _job(self, request: pb.PrefillRequest, ticket: Ticket | None) -> PrefillJob:
        prompt = tuple(request.prompt_token_ids)
        key = self._worker.hash_key(request.cache_salt)
        return PrefillJob(
            request_id=RequestId(request.ref.request_id),
            prompt_token_ids=prompt,
            params=sampling_from_wire(request.sampling),
            hash_key=key,
            hashes=hash_blocks(key, prompt, self._worker.model.layout.block_size),
            forced_first_tokens=tuple(request.forced_first_tokens),
            # One message for all layers can go no sooner than at the step's end, of which every prompt is told.
            report_layers=ticket.groups.ends if ticket is not None and ticket.layer_groups > 1 else (),
            router_id=RouterId(request.ref.router_id),
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
