"""One prompt on a prefill worker: computed in chunks, sent while it is computed, committed at the decode worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from kvtransfer.handover.sender import Sender
from kvtransfer.handover.ticket import Commit, Ticket, commit_to_proto
from pdserve.base.ids import BlockId, RequestId
from pdserve.base.rpc import ChannelPool, mapped_rpc_errors
from pdserve.base.sampling import ChoiceTokens
from pdserve.base.wire import tokens_to_wire
from pdserve.engine.step import LayersWritten, PrefillProgress, RequestStarted, RequestTokens
from pdserve.v1 import decode_pb2, decode_pb2_grpc
from pdserve.v1 import prefill_pb2 as pb
from pdserve.worker.serve.inboxes import Inbox
from pdserve.worker.serve.worker import Worker
from prefill_svc.pusher import Pusher, pushing
from prefill_svc.scheduler import PrefillJob, PrefillScheduler

#: How often a waiting prompt says that it is still alive; well below any lease.
KEEP_ALIVE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The prompt's first step began at `at` (event loop time, seconds); it is told when that step is over."""

    started: RequestStarted
    at: float

    @property
    def request_id(self) -> RequestId:
        """Whose prompt it is."""
        return self.started.request_id


Event = Begun | LayersWritten | PrefillProgress | RequestTokens


@dataclass(slots=True)
class _Times:
    """When what happened, on the event loop's clock, in seconds."""

    accepted: float
    started: float = 0.0
    computed: float = 0.0
    committed: float = 0.0


@dataclass(slots=True)
class _State:
    block_table: tuple[BlockId, ...] = ()
    num_cached: int = 0
    num_computed: int = 0
    num_chunks: int = 0
    first_tokens: tuple[ChoiceTokens, ...] = ()
    times: _Times = field(default_factory=lambda: _Times(accepted=_now()))


class PrefillSession:
    """Reads its inbox until the prompt is handed over. Leaving `run`, however, frees the prompt's blocks."""

    def __init__(
        self,
        worker: Worker,
        scheduler: PrefillScheduler,
        sender: Sender,
        channels: ChannelPool,
        inbox: Inbox[Event],
        write: Callable[[pb.PrefillResponse], Awaitable[None]],
    ) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._sender = sender
        self._channels = channels
        self._inbox = inbox
        self._write = write
        self._request_id = inbox.request_id
        self._state = _State()
        #: How the transfer ended.
        self.outcome = "aborted"

    async def run(self, job: PrefillJob, ticket: Ticket | None) -> None:
        """Raises what ended the prompt before it was handed over."""
        try:
            async with self._transfer(ticket) as pusher:
                self._state.num_cached = await self._worker.run(lambda: self._add(job))
                await self._compute(job, pusher)
                # Nothing is left to decode when every choice ended with its first token: the ticket stays unused.
                if all(choice.finish_reason for choice in self._state.first_tokens):
                    self.outcome = "not_needed"
                elif pusher is not None:
                    assert ticket is not None
                    await self._drained(pusher)
                    await pusher.transfer.finish(
                        [choice.token_ids[0] for choice in self._state.first_tokens],
                        lambda commit: self._commit(ticket, commit),
                    )
                    self._state.times.committed = _now()
                    self.outcome = "committed"
            await self._write(pb.PrefillResponse(done=self._summary(pusher)))
        finally:
            await self._worker.run(lambda: self._scheduler.abort(self._request_id))

    def _add(self, job: PrefillJob) -> int:
        """On the step thread. The prompt tokens that need not be computed, as it seems now."""
        self._scheduler.add(job)
        return self._scheduler.num_cached(job.request_id)

    @asynccontextmanager
    async def _transfer(self, ticket: Ticket | None) -> AsyncIterator[Pusher | None]:
        if ticket is None:
            yield None
            return
        with self._worker.metrics.kv_transfers_active.track_inprogress():
            async with (
                self._sender.open(ticket, request_id=self._request_id) as transfer,
                pushing(transfer, ticket) as pusher,
            ):
                yield pusher

    async def _compute(self, job: PrefillJob, pusher: Pusher | None) -> None:
        """Until the first tokens are told; blocks go out meanwhile."""
        state = self._state
        while not (state.first_tokens and state.num_computed == len(job.prompt_token_ids)):
            event = await self._inbox.next(timeout_s=KEEP_ALIVE_S)
            match event:
                case Begun(started=started, at=at):
                    state.times.started = at
                    state.block_table = started.block_table
                    state.num_cached = state.num_computed = started.num_cached
                case LayersWritten():
                    if pusher is not None:
                        stop = self._num_complete(job, event.num_computed)
                        pusher.stored(event.block_table, stop, num_layers=event.num_layers, at=event.ready_event)
                    continue
                case PrefillProgress():
                    state.num_computed = event.num_computed
                    state.num_chunks += 1
                    if pusher is not None:
                        pusher.stored(state.block_table, self._num_complete(job, event.num_computed))
                case RequestTokens():
                    state.times.computed = _now()
                    state.first_tokens = event.choices
                    await self._tell_first_tokens()
                    continue
                case None:
                    pass
            await self._keep_alive(pusher)

    async def _drained(self, pusher: Pusher) -> None:
        """Returns when all that was stored is on the wire."""
        while not pusher.is_idle:
            with suppress(TimeoutError):
                async with asyncio.timeout(KEEP_ALIVE_S):
                    await pusher.drained()
                return
            if pusher.transfer.waits_for_memory:
                await self._keep_alive(pusher)

    async def _keep_alive(self, pusher: Pusher | None) -> None:
        """What waits for the wire has its progress to go by; else the router keeps the decode worker's lease."""
        if pusher is not None and (pusher.is_idle or pusher.transfer.waits_for_memory):
            pusher.transfer.keep_lease()
        await self._tell_progress()

    def _num_complete(self, job: PrefillJob, num_computed: int) -> int:
        """Blocks to which nothing is added any more: full ones, and the prompt's last."""
        block_size = self._worker.model.layout.block_size
        is_all = num_computed == len(job.prompt_token_ids)
        return -(-num_computed // block_size) if is_all else num_computed // block_size

    async def _commit(self, ticket: Ticket, commit: Commit) -> decode_pb2.CommitResponse:
        peer = f"decode worker {ticket.worker_id}"
        async with self._channels.use(ticket.worker_id, ticket.epoch, ticket.grpc_address) as channel:
            with mapped_rpc_errors(peer):
                answer: decode_pb2.CommitResponse = await decode_pb2_grpc.DecodeServiceStub(channel).Commit(
                    commit_to_proto(commit)
                )
        return answer

    async def _tell_first_tokens(self) -> None:
        state = self._state
        message = pb.PrefillFirstToken(
            choices=[tokens_to_wire(choice) for choice in state.first_tokens], cached_tokens=state.num_cached
        )
        await self._write(pb.PrefillResponse(first_token=message))

    async def _tell_progress(self) -> None:
        state = self._state
        message = pb.PrefillProgress(
            queued=not state.block_table,
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
