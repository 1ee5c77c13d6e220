"""One prompt on a prefill worker: computed in chunks, sent while it is computed, committed at the decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from kvtransfer.handover.send_path import SendStats
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.ticket import Commit, Ticket
from pdserve.base.ids import BlockTables, RequestId
from pdserve.base.sampling import ChoiceTokens
from pdserve.base.wire import tokens_to_wire
from pdserve.engine.step import LayersWritten, PrefillProgress, PromptEmbedding, PromptScores, RequestTokens
from pdserve.net.rpc import ChannelPool
from pdserve.v1 import common_pb2, decode_pb2
from pdserve.v1 import prefill_pb2 as pb
from pdserve.worker.serve.committing import commit_transfer
from pdserve.worker.serve.inboxes import Inbox
from pdserve.worker.serve.worker import KEEP_ALIVE_S, Worker
from prefill_svc.pusher import Pusher, pushing
from prefill_svc.request import PrefillJob
from prefill_svc.scheduler import PrefillScheduler
from prefill_svc.spans import PromptTimes

T = TypeVar("T")


class TransferOutcome(StrEnum):
    """How a prompt's transfer ended, unless an error ended it. The values are labels of a metric."""

    ABORTED = "aborted"
    #: Every choice ended with its first token: the ticket stays unused.
    NOT_NEEDED = "not_needed"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStarted:
    """The first step of a prompt has ended."""

    request_id: RequestId
    attempt: int
    #: Start of that step on the event loop's clock, in seconds.
    started_at: float
    num_cached: int
    block_tables: BlockTables


class GaveWay:
    """A prompt that is handed over is not retained any more: newer ones need the share, or the worker ends."""


PromptEvent = PromptStarted | GaveWay | LayersWritten | PrefillProgress | PromptScores | PromptEmbedding | RequestTokens


@dataclass(slots=True, kw_only=True)
class _State:
    """What is known of the prompt so far."""

    times: PromptTimes
    block_tables: BlockTables = ()
    num_cached: int = 0
    num_computed: int = 0
    num_chunks: int = 0
    first_tokens: tuple[ChoiceTokens, ...] = ()


class PrefillSession:
    """Handles its inbox until the prompt is handed over. However `run` ends, the prompt's blocks are freed."""

    def __init__(
        self,
        worker: Worker,
        scheduler: PrefillScheduler,
        sender: Sender,
        channels: ChannelPool,
        inbox: Inbox[PromptEvent],
        write: Callable[[pb.PrefillResponse], Awaitable[None]],
    ) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._sender = sender
        self._channels = channels
        self._inbox = inbox
        self._write = write
        self._request_id = inbox.request_id
        self._state = _State(times=PromptTimes(accepted=_now()))
        self.outcome = TransferOutcome.ABORTED
        #: What was put on the wire; None without a transfer.
        self.sent: SendStats | None = None

    @property
    def times(self) -> PromptTimes:
        """What happened when, so far."""
        return self._state.times

    async def run(self, job: PrefillJob, ticket: Ticket | None) -> None:
        """Raises the error that ended the prompt before it was handed over."""
        try:
            # Queued first: the first transfer to a decode worker connects to it, which takes as long as some layers.
            self._state.num_cached = await self._worker.run(lambda: self._add(job))
            async with self._transfer(job, ticket) as pusher:
                await self._compute_and_hand_over(job, pusher, ticket)
            await self._write(pb.PrefillResponse(done=self._summary(pusher)))
        finally:
            await self._worker.run(lambda: self._scheduler.release(self._request_id), ends=self._request_id)

    async def _compute_and_hand_over(self, job: PrefillJob, pusher: Pusher | None, ticket: Ticket | None) -> None:
        try:
            await self._compute(job, pusher)
            if all(choice.finish_reason for choice in self._state.first_tokens):
                self.outcome = TransferOutcome.NOT_NEEDED
            elif pusher is not None:
                assert ticket is not None
                await self._hand_over(pusher, ticket)
        except BaseException:
            # At once: the transfer may have to wait for a decode worker that takes nothing.
            await self._worker.run(lambda: self._scheduler.stop(self._request_id), ends=self._request_id)
            raise

    def _add(self, job: PrefillJob) -> int:
        """On the step thread: queue the prompt; returns the number of its tokens that are cached at present."""
        self._scheduler.add(job)
        return self._scheduler.num_cached(job.request_id)

    @asynccontextmanager
    async def _transfer(self, job: PrefillJob, ticket: Ticket | None) -> AsyncIterator[Pusher | None]:
        if ticket is None:
            yield None
            return
        num_prompt_tokens = len(job.prompt_token_ids)
        with self._worker.metrics.sending():
            async with (
                self._channels.use(ticket.worker_id, ticket.epoch, ticket.grpc_address),  # Connects for the commit.
                self._sender.open(ticket, request_id=self._request_id) as transfer,
                pushing(transfer, ticket, num_prompt_tokens=num_prompt_tokens) as pusher,
            ):
                try:
                    yield pusher
                finally:
                    self.sent = transfer.stats

    async def _compute(self, job: PrefillJob, pusher: Pusher | None) -> None:
        """Handles events until the prompt is computed and its first tokens are reported; blocks go out meanwhile."""
        state = self._state
        while not (state.first_tokens and state.num_computed == len(job.prompt_token_ids)):
            match await self._inbox.next(timeout_s=KEEP_ALIVE_S):
                case PromptStarted() as started:
                    state.times.started = started.started_at
                    state.block_tables = started.block_tables
                    state.num_cached = state.num_computed = started.num_cached
                    await self._report_progress(pusher)
                # Not reported: there can be many in a step, whose end is.
                case LayersWritten(block_tables=tables, num_computed=num_tokens) as written:
                    if pusher is not None:
                        pusher.stored(tables, num_tokens, num_layers=written.num_layers, after=written.ready_event)
                case PrefillProgress(num_computed=num_tokens):
                    state.num_computed = num_tokens
                    state.num_chunks += 1
                    state.times.add_chunk(_now(), num_tokens)
                    if pusher is not None:
                        pusher.stored(state.block_tables, num_tokens)
                    await self._report_progress(pusher)
                case RequestTokens(choices=choices):
                    state.times.computed = _now()
                    state.first_tokens = choices
                    await self._send_first_tokens()
                case None:
                    if not self._worker.is_hung:
                        await self._report_progress(pusher)

    async def _hand_over(self, pusher: Pusher, ticket: Ticket) -> None:
        """Returns when the decode worker has committed the transfer."""
        await self._drained(pusher)
        await pusher.transfer.finish(
            [choice.token_ids[0] for choice in self._state.first_tokens],
            lambda commit: self._commit(ticket, commit),
        )
        self._state.times.committed = _now()
        self.outcome = TransferOutcome.COMMITTED

    async def _drained(self, pusher: Pusher) -> None:
        """Returns when all that was stored is on the wire."""
        while not pusher.is_idle:
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await pusher.drained()
                return
            if pusher.transfer.waits_for_memory:
                await self._report_progress(pusher)
            else:
                await self._keep_alive()

    async def _report_progress(self, pusher: Pusher | None) -> None:
        """Reports progress to the router, which keeps the decode worker's lease.

        Our end of the lease is kept here, too, unless blocks wait for the wire: those show progress by leaving.
        """
        if pusher is not None and (pusher.is_idle or pusher.transfer.waits_for_memory):
            pusher.transfer.keep_lease()
        await self._send_progress()

    async def _commit(self, ticket: Ticket, commit: Commit) -> decode_pb2.CommitResponse:
        async with self._channels.use(ticket.worker_id, ticket.epoch, ticket.grpc_address) as channel:
            return await self._answered(commit_transfer(self._worker, channel, ticket, commit))

    async def _answered(self, call: Awaitable[T]) -> T:
        """The answer to a call; meanwhile the router learns that this worker lives.

        No other task writes the keep-alives: it would be cancelled when the answer comes, and grpc refuses the next
        message of a call while that of a cancelled task is on its way.
        """
        answer = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait((answer,), timeout=KEEP_ALIVE_S))[0]:
                await self._keep_alive()
            return answer.result()
        finally:
            answer.cancel()
            await asyncio.wait((answer,))
            if not answer.cancelled():
                answer.exception()  # Retrieved, since the caller may see another error.

    async def _keep_alive(self) -> None:
        """Shows the router that this worker lives while it waits for another one. It keeps no lease."""
        await self._write(pb.PrefillResponse(keep_alive=common_pb2.KeepAlive()))

    async def _send_first_tokens(self) -> None:
        state = self._state
        message = pb.PrefillFirstToken(
            choices=[tokens_to_wire(choice) for choice in state.first_tokens], cached_tokens=state.num_cached
        )
        await self._write(pb.PrefillResponse(first_token=message))

    async def _send_progress(self) -> None:
        state = self._state
        message = pb.PrefillProgress(
            queued=not state.block_tables,
            computed_tokens=state.num_computed,
            cached_tokens=state.num_cached,
            computing_s=_now() - state.times.started if state.times.started else 0.0,
        )
        await self._write(pb.PrefillResponse(progress=message))

    def _summary(self, pusher: Pusher | None) -> pb.PrefillDone:
        state, times = self._state, self._state.times
        done = pb.PrefillDone(
            queue_s=times.started - times.accepted,
            compute_s=times.computed - times.started,
            chunks=state.num_chunks,
            cached_tokens=state.num_cached,
        )
        if pusher is not None:
            stats = pusher.transfer.stats
            done.transfer_s = stats.busy_s
            done.sent_bytes = stats.sent_bytes
            done.sent_blocks = stats.sent_blocks
            if times.committed:
                done.commit_s = times.committed - times.computed
                done.exposed_s = max(0.0, (stats.last_done_at or 0.0) - times.computed)
                self._worker.metrics.kv_transfer_exposed_seconds.observe(done.exposed_s)
            self._worker.metrics.sent(stats.sent_bytes, stats.sent_blocks, stats.busy_s, self._worker.transport.name)
        return done


def _now() -> float:
    return asyncio.get_running_loop().time()
