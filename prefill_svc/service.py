"""The prefill tier's gRPC method; routes the events of each step to the prompts that they concern."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, ExitStack
from functools import partial

import grpc

from kvtransfer.handover.sealed_ticket import opened_ticket
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.ticket import Ticket
from pdserve.base.block_hash import hash_blocks
from pdserve.base.errors import Draining, PdserveError, RequestError, reason_of
from pdserve.base.ids import RequestId, RouterId
from pdserve.base.logs import enter_request, get_logger
from pdserve.base.wire import pooling_from_wire, sampling_from_wire
from pdserve.engine.step import LayersWritten, PromptEmbedding, PromptScores, RequestTokens, StepOutput
from pdserve.net import rpc
from pdserve.net.grpc_server import whole_writes
from pdserve.observe.tracing.spans import Attribute
from pdserve.peers.seals import Purpose
from pdserve.peers.workers import Tier
from pdserve.v1 import common_pb2
from pdserve.v1 import prefill_pb2 as pb
from pdserve.v1 import prefill_pb2_grpc as pb_grpc
from pdserve.worker.config import WorkerConfig
from pdserve.worker.serve.data_addresses import DataAddressCalls
from pdserve.worker.serve.fixed_role import fixed_role
from pdserve.worker.serve.inboxes import Failed, Inboxes
from pdserve.worker.serve.worker import Worker
from prefill_svc.request import PrefillJob, PrefillSchedulerConfig
from prefill_svc.retention import Retention
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.scoring import ScoringSession, scoring_params
from prefill_svc.session import PrefillSession, PromptEvent, PromptStarted, TransferOutcome
from prefill_svc.spans import PromptTrace

log = get_logger(__name__)

#: Maximum number of channels for commits, one per incarnation of a decode worker. The least recently used is closed.
_MAX_DECODE_CHANNELS = 64


class PrefillService(pb_grpc.PrefillServiceServicer):
    """Implements `pdserve.worker.serve.worker.TierService`."""

    name = "pdserve.v1.PrefillService"
    itl_budget_s = None

    def __init__(self, worker: Worker, config: WorkerConfig) -> None:
        # A step computes at least one token of each of its prompts.
        self.max_num_seqs = config.max_prompt_tokens
        self.scheduler = PrefillScheduler(
            worker.model.pool,
            PrefillSchedulerConfig(limits=worker.model.limits, max_num_batched_tokens=config.max_prompt_tokens),
        )
        self._worker = worker
        self._inboxes: Inboxes[PromptEvent] = Inboxes(worker.metrics.stale)
        self._retention = Retention(worker, self._inboxes)
        self._sender = Sender(
            transport=worker.transport,
            memory=worker.blocks,
            layout=worker.model.layout,
            on_peer=worker.paths.observe,
            calls=DataAddressCalls(worker, self._channel_to),
        )
        self._channels = rpc.ChannelPool(max_kept=_MAX_DECODE_CHANNELS, tls=worker.tls)

    # TierService
    def register(self, server: grpc.aio.Server) -> None:
        """Adds the gRPC method."""
        pb_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def start(self, grpc_address: str) -> str:
        """Nothing to do: prompts come over gRPC, and this tier has no other address."""
        return ""

    def on_step(self, output: StepOutput) -> None:
        """Passes a step's events to their prompts; tokens before progress, since a client waits for them."""
        events = output.events
        started_at = _now() - output.durations.total_s
        started = (
            PromptStarted(
                request_id=each.request_id,
                attempt=each.attempt,
                started_at=started_at,
                num_cached=each.num_cached,
                block_tables=each.block_tables,
            )
            for each in events.started
        )
        reported: tuple[RequestTokens | PromptScores | PromptEmbedding, ...] = (
            *events.tokens,
            *events.scores,
            *events.embeddings,
        )
        for event in (*started, *reported, *events.progress):
            self._inboxes.put(event.request_id, event.attempt, event)
        for failure in events.failures:
            self._inboxes.put(failure.request_id, failure.attempt, Failed(error=failure.error))

    def drain(self, within_s: float) -> None:
        """Hands back the prompts of which nothing is computed. The others are computed and sent."""
        self._worker.tasks.start(self._hand_back(), name="drain")

    def stay(self) -> None:
        """Nothing to take back: prompts that were handed back are elsewhere."""

    async def rebalance(self, num_sequences: int) -> int:
        """Raises: RequestError, since prompts do not move."""
        raise RequestError("A prefill worker has no running requests that could move. Name a decode worker.")

    def take_role(self, tier: Tier) -> None:
        """Raises: RequestError, since this service has only its own tier."""
        raise fixed_role("prefill")

    def give_up(self, error: PdserveError) -> None:
        """Ends the prompts that are still here with this error."""
        self._inboxes.fail_all(error)

    def on_layers(self, written: LayersWritten) -> None:
        """Passes a report from within a step to its prompt."""
        self._inboxes.put(written.request_id, written.attempt, written)

    def end_idle(self) -> None:
        """Retains no prompt any more."""
        self._retention.end_all()

    async def close(self) -> None:
        """Closes the channels to decode workers."""
        await self._channels.close()

    # PrefillService
    @rpc.method
    async def Prefill(  # noqa: N802 - the name is the wire's
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillResponse]
    ) -> None:
        """Computes a prompt and hands it over, or scores or pools it."""
        with ExitStack() as counted:
            counted.enter_context(self._worker.calls.serving("prefill"))
            seals = self._worker.seals
            request = seals.open(Purpose.PROMPT, self._worker.seal_name, request)
            request_id = RequestId(request.ref.request_id)
            trace = PromptTrace.start(self._worker.tracer, rpc.trace_of(context))
            enter_request(request_id, trace.context)
            ticket = opened_ticket(request.ticket, request_id, seals) if request.HasField("ticket") else None
            write = whole_writes(context)
            keep_alive = partial(write, pb.PrefillResponse(keep_alive=common_pb2.KeepAlive()))
            async with self._inboxes.open(request_id, request.ref.attempt, meanwhile=keep_alive) as inbox:
                session: PrefillSession | ScoringSession
                if request.scores_prompt or request.HasField("pooling"):
                    outcome = "scored" if request.scores_prompt else "pooled"
                    session = ScoringSession(self._worker, self.scheduler, inbox, write, outcome)
                else:
                    session = PrefillSession(self._worker, self.scheduler, self._sender, self._channels, inbox, write)
                failure: str | None = None
                try:
                    job = await self._job(request, ticket)
                    await session.run(job, ticket)
                except PdserveError as error:
                    failure = reason_of(error)
                    log.warning("prefill_failed", reason=error)
                    raise
                finally:
                    if ticket is not None:
                        self._worker.metrics.ended(failure or session.outcome)
                    attributes = self._attributes(request, session.outcome)
                    trace.end(session.times, attributes, ticket=ticket, sent=session.sent, error=failure)
                if request.retains_prompt and session.outcome == TransferOutcome.COMMITTED:
                    counted.close()  # A worker that drains does not wait for it.
                    hashes = job.hashes
                    del request, job, session  # Prompts are large, and this may take long.
                    await self._retention.until_over(inbox, hashes)

    async def _hand_back(self) -> None:
        for attempt_id in await self._worker.run(self.scheduler.hand_back):
            self._inboxes.put(*attempt_id, Failed(error=Draining("The worker drains. Retry on another one.")))

    def _channel_to(self, ticket: Ticket) -> AbstractAsyncContextManager[grpc.aio.Channel]:
        return self._channels.use(ticket.worker_id, ticket.epoch, ticket.grpc_address)

    def _attributes(self, request: pb.PrefillRequest, outcome: str) -> dict[str, Attribute]:
        return {
            "pdserve.request_id": request.ref.request_id,
            "pdserve.attempt": request.ref.attempt,
            "pdserve.worker": self._worker.worker_id,
            "pdserve.prompt_tokens": len(request.prompt_token_ids),
            "pdserve.outcome": outcome,
        }

    async def _job(self, request: pb.PrefillRequest, ticket: Ticket | None) -> PrefillJob:
        prompt, params = tuple(request.prompt_token_ids), sampling_from_wire(request.sampling)
        if ticket is not None:
            self._sender.require_compatible(ticket)
            ticket.require_end_of(len(prompt))
        pooling = pooling_from_wire(request.pooling) if request.HasField("pooling") else None
        if pooling is not None and request.scores_prompt:
            raise RequestError("A prompt is either scored or pooled. Send one of `scores_prompt` and `pooling`.")
        key = self._worker.hash_key(request.cache_salt)
        return PrefillJob(
            request_id=RequestId(request.ref.request_id),
            attempt=request.ref.attempt,
            prompt_token_ids=prompt,
            params=scoring_params(params) if request.scores_prompt else params,
            grammar=None if request.scores_prompt or pooling else await self._worker.grammars.get(params),
            hash_key=key,
            hashes=hash_blocks(key, prompt, self._worker.model.layout.block_size),
            forced_first_tokens=tuple(request.forced_first_tokens),
            is_scored=request.scores_prompt,
            pooling=pooling,
            # With one message for all layers, the end of each step is soon enough, and it is reported in any case.
            report_layers=ticket.groups.report_layers if ticket is not None and ticket.layer_groups > 1 else (),
            router_id=RouterId(request.ref.router_id),
            is_alone=request.ref.alone,
            is_best_effort=request.ref.best_effort,
            arrived_at=_now() - request.ref.waited_ms / 1000,
        )


def _now() -> float:
    return asyncio.get_running_loop().time()
