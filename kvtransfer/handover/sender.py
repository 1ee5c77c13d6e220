"""The prefill worker's end of the handover: pushes blocks while later ones are computed, and commits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.events import (
    Aborted,
    AllSent,
    CommitAnswered,
    Disconnect,
    Event,
    LeaseKept,
    SendDone,
    SendStarted,
    TimePassed,
)
from kvtransfer.handover.memory import BlockMemory, Bundle, MessageSpec
from kvtransfer.handover.peers import PeerTable
from kvtransfer.handover.send_machine import SendMachine, SendState
from kvtransfer.handover.ticket import Commit, Ticket, signed_commit
from kvtransfer.transport import Buffer, Operation, Peer, Transport
from pdserve.base.device_event import DeviceEvent
from pdserve.base.errors import PdserveError, PeerLost, TransferError, TransferTimeout
from pdserve.base.ids import BlockId, RequestId
from pdserve.base.layout import KvLayout

T = TypeVar("T")

#: Of what may be on the wire, as much is copied in one go where blocks have to be copied before they are sent.
_LOADED_AT_ONCE = 1 / 4
#: Of memory to copy to: a peer that takes nothing any more leaves the rest to transfers to others.
_SHARE_OF_MEMORY = 1 / 4
#: The event loop, and with it the wire, gets a turn after this many bytes were digested.
_TURN_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStats:
    """What one transfer put on the wire. Times are the event loop's, in seconds; None before the first block."""

    #: Whole ones.
    sent_blocks: int
    sent_bytes: int
    #: Time in which at least a part of a block was on its way.
    busy_s: float
    first_started_at: float | None
    last_done_at: float | None


class Sender:
    """Every transfer out of this worker. Use it from the event loop that opened the transport."""

    def __init__(
        self,
        *,
        transport: Transport,
        memory: BlockMemory,
        layout: KvLayout,
        max_outstanding_bytes: int | None = None,
    ) -> None:
        self._transport = transport
        self._memory = memory
        self._layout = layout
        self._max_outstanding_bytes = max_outstanding_bytes or memory.window_bytes
        self._peers = PeerTable(transport)

    def _max_outstanding(self, ticket: Ticket) -> int:
        """Messages: as many as a window of bytes, in at most a share of the memory that all transfers have together."""
        in_window = self._max_outstanding_bytes // (ticket.groups.max_block_bytes * ticket.bundle_blocks)
        lendable = self._memory.max_blocks // self._memory.bundle_blocks
        return max(1, min(in_window, int(_SHARE_OF_MEMORY * lendable)))

    @asynccontextmanager
    async def open(self, ticket: Ticket, *, request_id: RequestId) -> AsyncIterator[OutgoingTransfer]:
        """One transfer. When the block is left, however, nothing reads the pushed blocks any more: they may be freed.

        Leaving it without `finish` aborts the transfer; that waits for what is on the wire, at most for the lease.
        Raises: LayoutMismatch, TransferError when the ticket is for another transport, PeerLost, TransferTimeout.
        """
        self._layout.require_equal(ticket.layout)
        if ticket.transport != self._transport.name:
            raise TransferError(
                f"the ticket is for transport {ticket.transport!r} and this worker uses {self._transport.name!r}. "
                "Start both tiers with the same --transport."
            )
        if ticket.digest != self._memory.digest:
            raise TransferError(
                f"the ticket asks for digests {ticket.digest!r}, and this worker's memory has {self._memory.digest!r}. "
                "Start both tiers with the same --handover-memory."
            )
        machine = SendMachine(
            num_bundles=ticket.bundles.count,
            layer_groups=ticket.layer_groups,
            lease_s=ticket.lease_s,
            now=asyncio.get_running_loop().time(),
            unit=ticket.bundles.unit,
        )
        async with self._peers.use(ticket.data_address, deadline=machine.deadline) as peer:
            transfer = OutgoingTransfer(
                transport=self._transport,
                memory=self._memory,
                peer=peer,
                ticket=ticket,
                request_id=request_id,
                machine=machine,
                max_outstanding=self._max_outstanding(ticket),
            )
            try:
                yield transfer
            finally:
                await transfer._close()


class OutgoingTransfer:
    """One ticket being served. Used by one task at a time."""

    def __init__(
        self,
        *,
        transport: Transport,
        memory: BlockMemory,
        peer: Peer,
        ticket: Ticket,
        request_id: RequestId,
        machine: SendMachine,
        max_outstanding: int,
    ) -> None:
        self._transport = transport
        self._memory = memory
        self._peer = peer
        self._ticket = ticket
        self._request_id = request_id
        self._machine = machine
        self._max_outstanding = max_outstanding
        self._digest = MessageDigest(ticket.key)
        self._groups = ticket.groups
        #: Of each group, in the order of the bundles.
        self._digests: list[list[bytes]] = [[] for _ in range(ticket.layer_groups)]
        self._sent_bytes = 0
        #: For its own worker's memory, of which others have too much: the peer has nothing to do with it.
        self.waits_for_memory = False
        self._changed = asyncio.Event()
        self._wire = _WireClock()
        self._commit_timeout: asyncio.Timeout | None = None
        self._loop = asyncio.get_running_loop()  # Kept: asking is a system call, and it is several times per block.
        self._timer = self._loop.call_at(machine.deadline, self._on_timer)

    @property
    def quiet(self) -> bool:
        """Nothing of this transfer is on the wire at the moment."""
        return self._machine.num_outstanding == 0

    @property
    def num_unsent(self) -> int:
        """Messages of the ticket that were not pushed yet."""
        return self._machine.num_unsent

    @property
    def stats(self) -> SendStats:
        """So far."""
        return SendStats(
            sent_blocks=self._sent_bytes // self._ticket.layout.block_bytes,
            sent_bytes=self._sent_bytes,
            busy_s=self._wire.busy_s(self._loop.time()),
            first_started_at=self._wire.first_started_at,
            last_done_at=self._wire.last_done_at,
        )

    def keep_lease(self) -> None:
        """The prompt is being computed, and the decode worker is told so by another way."""
        self._handle(LeaseKept())

    async def push(self, block_ids: Sequence[BlockId], *, group: int = 0, after: DeviceEvent | None = None) -> None:
        """Sends a group of layers of the next blocks of the ticket, in its order, as they are `after`.

        Each group goes through all bundles by itself; only the ticket's last may be cut short. Returns when the last
        one's is on the wire.
        Raises: TransferTimeout when the lease ended, PeerLost; nothing more can be sent then.
        """
        bundles = self._ticket.bundles.of(block_ids)
        spec = MessageSpec(layers=self._groups.layers[group], digest=self._digest, after=after)
        # No more at a time than may be on the wire: what has been lent to others comes back only when it was sent.
        at_once = self._max_outstanding
        if self._memory.copies:  # The first leave while the next are copied.
            at_once = max(1, int(_LOADED_AT_ONCE * at_once))
        for first in range(0, len(bundles), at_once):
            some = bundles[first : first + at_once]
            lent = await self._lend(some)
            try:
                digests = await self._memory.load(some, lent, spec)
                await self._push_lent(lent, group, [len(bundle) for bundle in some], digests)
            finally:
                for buffer in lent:
                    self._memory.give_back(buffer)

    async def _lend(self, bundles: Sequence[Bundle]) -> list[Buffer]:
        """As `BlockMemory.lend`, until the transfer is over."""
        if not self._memory.copies:
            return await self._memory.lend(bundles)
        lending = asyncio.ensure_future(self._memory.lend(bundles))
        self.waits_for_memory = True
        try:
            while not lending.done():
                change = asyncio.ensure_future(self._change())
                await asyncio.wait((lending, change), return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                self._require_alive()
            return lending.result()
        except BaseException:
            lending.cancel()
            await asyncio.wait((lending,))
            if not lending.cancelled() and lending.exception() is None:
                for buffer in lending.result():
                    self._memory.give_back(buffer)
            raise
        finally:
            self.waits_for_memory = False

    async def _push_lent(self, lent: list[Buffer], group: int, sizes: list[int], digests: list[bytes]) -> None:
        """Takes each buffer off the list when it is on the wire, from where it is given back."""
        since_turn = 0
        for place, size in enumerate(sizes):
            while self._machine.num_outstanding >= self._max_outstanding and self._machine.state is SendState.SENDING:
                await self._change()
            self._require_alive()
            since_turn += self._push_one(lent[0], group, size, digests[place] if digests else None)
            del lent[0]
            if since_turn >= _TURN_BYTES:
                since_turn = 0
                await asyncio.sleep(0)

    async def finish(self, first_tokens: Sequence[int], commit: Callable[[Commit], Awaitable[T]]) -> T:
        """Commits, and waits for the answer and for every block to have left; gives what `commit` gave.

        The commit goes out at once: the decode worker waits for the blocks it overtakes.
        Raises: what `commit` raises; TransferTimeout when the lease ended, PeerLost.
        """
        self._require_alive()
        self._handle(AllSent())
        message = signed_commit(
            self._ticket,
            request_id=self._request_id,
            digests=tuple(chain.from_iterable(zip(*self._digests, strict=True))),
            first_tokens=tuple(first_tokens),
        )
        try:
            answer = await self._within_lease(commit(message))
        except PdserveError as error:
            self._handle(CommitAnswered(error=error))
            raise
        self._handle(CommitAnswered())
        while self._machine.state is not SendState.CLOSED:
            await self._change()
        # What the decode worker has verified counts, even when the wire reported a fault afterwards.
        return answer

    # Inside.
    async def _within_lease(self, commit: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self._machine.deadline) as timeout:
                # Progress on the wire moves the deadline, see `_handle`.
                self._commit_timeout = timeout
                try:
                    return await commit
                finally:
                    self._commit_timeout = None
        except TimeoutError as error:
            lost = self._machine.error
            raise lost or TransferTimeout("the decode worker did not answer the commit within the lease") from error

    def _push_one(self, bundle: Buffer, group: int, num_blocks: int, digest: bytes | None) -> int:
        digests, message = self._digests[group], bundle[self._groups.span(group, num_blocks)]
        index = len(digests) * self._groups.count + group
        self._handle(SendStarted(index=index))
        digests.append(self._digest(message) if digest is None else digest)
        self._wire.started(self._loop.time())
        send = self._transport.post_send(self._peer, self._ticket.tag(index), message)
        send.add_done_callback(partial(self._on_sent, index, bundle))
        return message.nbytes

    def _on_sent(self, index: int, bundle: Buffer, send: Operation) -> None:
        self._memory.give_back(bundle)
        self._wire.done(self._loop.time())
        error = send.error
        if error is None:
            self._sent_bytes += send.buffer.nbytes
        elif not isinstance(error, TransferError):
            error = PeerLost(str(error))
        self._handle(SendDone(index=index, error=error))

    def _on_timer(self) -> None:
        self._handle(TimePassed())
        if self._machine.state is not SendState.CLOSED:
            # A lease that is over and still not quiet has been disconnected: its sends are about to fail.
            at = max(self._machine.deadline, self._loop.time() + 0.01)
            self._timer = self._loop.call_at(at, self._on_timer)

    def _handle(self, event: Event) -> None:
        for effect in self._machine.handle(event, self._loop.time()):
            if isinstance(effect, Disconnect):
                self._transport.disconnect(self._peer)
        if self._commit_timeout is not None and not self._commit_timeout.expired():
            waits = self._machine.state is SendState.COMMITTING
            self._commit_timeout.reschedule(self._machine.deadline if waits else self._loop.time())
        self._changed.set()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _require_alive(self) -> None:
        if self._machine.state is SendState.SENDING and self._loop.time() >= self._machine.deadline:
            self._handle(TimePassed())
        if self._machine.state is not SendState.SENDING:
            raise self._machine.error or TransferError("the transfer is over")

    async def _close(self) -> None:
        """Not to be interrupted: leaving early would free blocks that the wire still reads."""
        self._handle(Aborted())
        cancelled: asyncio.CancelledError | None = None
        while self._machine.state is not SendState.CLOSED:
            try:
                await self._change()
            except asyncio.CancelledError as error:
                cancelled = error
        self._timer.cancel()
        if cancelled is not None:
            raise cancelled


class _WireClock:
    """The union of the intervals in which at least one message was on its way."""

    def __init__(self) -> None:
        self.first_started_at: float | None = None
        self.last_done_at: float | None = None
        self._outstanding = 0
        self._since = 0.0
        self._busy_s = 0.0

    def started(self, now: float) -> None:
        if self.first_started_at is None:
            self.first_started_at = now
        if self._outstanding == 0:
            self._since = now
        self._outstanding += 1

    def done(self, now: float) -> None:
        self.last_done_at = now
        self._outstanding -= 1
        if self._outstanding == 0:
            self._busy_s += now - self._since

    def busy_s(self, now: float) -> float:
        return self._busy_s + (now - self._since if self._outstanding else 0.0)
