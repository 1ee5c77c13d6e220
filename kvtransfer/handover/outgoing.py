"""One transfer out of this worker: the I/O layer of `SendMachine`, which sends blocks while later ones are computed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import TypeVar

from kvtransfer.handover import transfer_errors
from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.events import (
    Aborted,
    AllSent,
    CommitAnswered,
    Disconnect,
    LeaseKept,
    Released,
    SendDone,
    SendEvent,
    SendStarted,
    StopSending,
    TimePassed,
    WatchLease,
)
from kvtransfer.handover.memory import Bundle, MessageSpec, OfferSource, PreparedBlocks
from kvtransfer.handover.send_machine import SendMachine
from kvtransfer.handover.send_path import SendPath, SendStats, SentDigests, offered_runs
from kvtransfer.handover.ticket import Commit, Ticket, signed_commit
from kvtransfer.transport import Buffer, LocalTransports, Operation
from kvtransfer.transport.local.offer import Offer
from pdserve.base.device_event import DeviceEvent
from pdserve.base.errors import PdserveError
from pdserve.base.ids import BlockId, RequestId
from pdserve.base.tasks import run_to_completion, taken_unless

T = TypeVar("T")

#: Share of the messages that may be on the wire which is copied at once, where blocks are copied before they are sent.
_COPIED_AT_ONCE = 1 / 4
#: Bytes digested before the event loop, and with it the wire, gets a turn.
_YIELD_BYTES = 4 << 20
#: Offers of a transfer that the receiver has at a time: the one that it copies, and the next. Others wait for those of
#: other transfers.
_MAX_OFFERS = 2


class OutgoingTransfer:
    """One ticket being served. Used by one task at a time."""

    def __init__(self, ticket: Ticket, request_id: RequestId, machine: SendMachine, path: SendPath) -> None:
        self._ticket = ticket
        self._request_id = request_id
        self._machine = machine
        self._memory = path.memory
        self._transport = path.transport
        self._peer = path.peer
        self._max_outstanding = path.max_outstanding
        self._local = path.local
        self._num_offers = 0
        self._digest = MessageDigest(ticket.key)
        self._groups = ticket.groups
        self._digests = SentDigests(ticket.shape.num_messages)
        self._sent_bytes = 0
        self._is_waiting = False
        self._loop = asyncio.get_running_loop()  # Kept: asking for it is a system call, made several times per block.
        #: Set at every event: the window may have opened.
        self._changed = asyncio.Event()
        #: Done, with the reason, when nothing more can be sent.
        self._stopped: asyncio.Future[PdserveError] = self._loop.create_future()
        self._released = asyncio.Event()
        #: Ends a commit under way when the transfer stops.
        self._commit_timeout: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._handle(TimePassed())

    @property
    def quiet(self) -> bool:
        """Whether nothing of this transfer is on the wire now."""
        return self._machine.num_outstanding == 0

    @property
    def waits_for_memory(self) -> bool:
        """Whether it waits for this worker's own memory, and for nothing of the peer, which others hold up."""
        return self._is_waiting and self.quiet

    @property
    def num_unsent(self) -> int:
        """Messages of the ticket that were not pushed yet."""
        return self._machine.num_unsent

    @property
    def stats(self) -> SendStats:
        """Statistics so far."""
        wire_time = self._machine.wire_time
        return SendStats(
            sent_blocks=self._sent_bytes // self._ticket.layout.block_bytes,
            sent_bytes=self._sent_bytes,
            busy_s=wire_time.busy_s(self._loop.time()),
            first_started_at=wire_time.first_started_at,
            last_done_at=wire_time.last_done_at,
        )

    def keep_lease(self) -> None:
        """The prompt is being computed; the decode worker learns that from the router."""
        self._handle(LeaseKept())

    async def push(self, block_ids: Sequence[BlockId], *, group: int = 0, after: DeviceEvent | None = None) -> None:
        """Sends a layer group of its KV group's next blocks, in order; `after` is when they are computed.

        Each goes through all bundles of the KV group independently; only their last one may have fewer blocks. Returns
        when the last message is on the wire.
        Raises: TransferTimeout when the lease ended, PeerLost; nothing more can be sent then.
        """
        bundles = self._ticket.shape.bundles(block_ids)
        spec = MessageSpec(
            layers=self._groups.layers[group],
            kv_group=self._groups.kv_groups[group],
            digest=self._digest,
            after=after,
        )
        if self._local is not None:
            await self._offer_all(self._local, bundles, group, spec)
            return
        # At most what may be on the wire: buffers come back only when they were sent.
        at_once = self._max_outstanding
        if self._memory.copies:  # The first batch leaves while the next is copied.
            at_once = max(1, int(_COPIED_AT_ONCE * at_once))
        for first in range(0, len(bundles), at_once):
            batch = bundles[first : first + at_once]
            lending = self._memory.lend(batch, to_send=True)
            buffers = await self._lent(lending, self._give_back, may_wait=self._memory.copies)
            try:
                digests = await self._memory.load(batch, buffers, spec)
                await self._send_batch(batch, buffers, group, digests)
            finally:
                self._give_back(buffers)

    async def finish(self, first_tokens: Sequence[int], commit: Callable[[Commit], Awaitable[T]]) -> T:
        """Commits, waits for the answer and for every message to have left, and returns what `commit` returned.

        The commit goes out at once: the decode worker waits for the messages it overtakes.
        Raises: what `commit` raises; TransferTimeout when the lease ended, PeerLost.
        """
        for indices, digests in self._digests.waiting:
            self._digests.add_all(indices, await digests.found())
        self._advance(AllSent())
        message = signed_commit(
            self._ticket,
            request_id=self._request_id,
            digests=self._digests.all,
            first_tokens=tuple(first_tokens),
        )
        try:
            answer = await self._until_stopped(commit(message))
        except PdserveError as error:
            self._handle(CommitAnswered(error=error))
            raise
        self._handle(CommitAnswered())
        await self._released.wait()
        # What the decode worker has verified counts, even when the wire reported a fault afterwards.
        return answer

    async def close(self) -> None:
        """Ends the transfer. Returns when nothing reads its blocks; cancelling the caller does not shorten that."""
        self._handle(Aborted())
        try:
            if not self._released.is_set():
                await run_to_completion(self._released.wait())
        finally:
            if self._timer is not None:
                self._timer.cancel()

    # Inside.
    async def _lent(self, lending: Coroutine[object, object, T], let_go: Callable[[T], None], *, may_wait: bool) -> T:
        """Waits for this worker's memory, until the transfer is over."""
        self._is_waiting = may_wait
        try:
            return await (taken_unless(self._stopped, lending, let_go) if may_wait else lending)
        finally:
            self._is_waiting = False

    def _give_back(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self._memory.give_back(buffer)

    async def _send_batch(
        self, batch: Sequence[Bundle], buffers: list[Buffer], group: int, digests: Sequence[bytes]
    ) -> None:
        """Sends a message of each bundle. Takes each buffer off `buffers` as soon as its send gives it back."""
        since_yield = 0
        for position, bundle in enumerate(batch):
            while self._machine.num_outstanding >= self._max_outstanding and not self._stopped.done():
                await self._change()
            buffer = buffers[0]
            message = buffer[self._groups.span(group, len(bundle))]
            index = self._next_index(group)
            self._digests.add(index, digests[position] if digests else self._digest(message))
            self._advance(SendStarted(index=index))
            send = self._transport.post_send(self._peer, self._ticket.tag(index), message)
            send.add_done_callback(partial(self._on_sent, index, buffer))
            del buffers[0]
            since_yield += message.nbytes
            if since_yield >= _YIELD_BYTES:
                since_yield = 0
                await asyncio.sleep(0)

    async def _offer_all(
        self, local: tuple[LocalTransports, OfferSource], bundles: Sequence[Bundle], group: int, spec: MessageSpec
    ) -> None:
        """Offers the bundles' messages, whose digests may be computed while the receiver copies them."""
        (transport, source), step = local, self._ticket.shape.indices_of(group).step
        block_bytes = self._groups.span(group, 1).stop - self._groups.span(group, 1).start
        for run in offered_runs(bundles, block_bytes * self._ticket.bundle_blocks, source.run_bytes):
            while self._num_offers >= _MAX_OFFERS and not self._stopped.done():
                await self._change()
            preparing = source.prepare(run, spec)
            prepared = await self._lent(preparing, lambda prepared: prepared.release(), may_wait=source.is_bounded)
            index = self._next_index(group)
            offer = Offer(
                first_tag=self._ticket.tag(index),
                tag_step=step,
                num_messages=len(run),
                block_bytes=block_bytes,
                starts=prepared.starts,
            )
            try:
                self._advance(SendStarted(index=index, count=len(run)))
            except BaseException:
                prepared.release()
                raise
            self._num_offers += 1
            operation = transport.offer(self._peer, source.shared, offer)
            operation.add_done_callback(partial(self._on_offer_ended, index, offer, prepared))
            indices = range(index, index + len(run) * step, step)
            self._digests.waiting.append((indices, await prepared.digests()))

    def _on_offer_ended(self, index: int, offer: Offer, prepared: PreparedBlocks, operation: Operation) -> None:
        prepared.release()
        self._num_offers -= 1
        self._on_done(index, offer.num_messages, offer.num_bytes, operation.error)

    def _next_index(self, group: int) -> int:
        index = self._machine.next_index(group)
        assert index is not None, "more blocks were pushed than the ticket has"
        return index

    def _on_sent(self, index: int, buffer: Buffer, send: Operation) -> None:
        self._memory.give_back(buffer)
        self._on_done(index, 1, send.buffer.nbytes, send.error)

    def _on_done(self, index: int, count: int, num_bytes: int, error: PdserveError | None) -> None:
        if error is None:
            self._sent_bytes += num_bytes
        of_transfer = None if error is None else transfer_errors.of_transport(error)
        self._handle(SendDone(index=index, count=count, error=of_transfer))

    async def _until_stopped(self, commit: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(None) as timeout:
                self._commit_timeout = timeout
                try:
                    return await commit
                finally:
                    self._commit_timeout = None
        except TimeoutError:
            if self._stopped.done():
                raise self._stopped.result() from None
            raise

    def _advance(self, event: SendEvent) -> None:
        """Handles an event that only a transfer that sends may take. Raises the reason why it does not send."""
        self._require_sending()
        self._handle(event)
        self._require_sending()

    def _require_sending(self) -> None:
        if self._stopped.done():
            raise self._stopped.result()

    def _handle(self, event: SendEvent) -> None:
        for effect in self._machine.handle(event, self._loop.time()):
            match effect:
                case WatchLease(until=until):
                    if self._timer is not None:
                        self._timer.cancel()
                    self._timer = self._loop.call_at(until, self._handle, TimePassed())
                case StopSending(error=error):
                    self._stopped.set_result(error)
                    if self._commit_timeout is not None:
                        self._commit_timeout.reschedule(self._loop.time())
                case Disconnect():
                    self._transport.disconnect(self._peer)
                case Released():
                    self._released.set()
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
