"""The prefill worker's end of the handover: accepts tickets and opens transfers to the workers that granted them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from kvtransfer.handover import transfer_errors
from kvtransfer.handover.introduction import Introductions, NoCalls, TicketCalls
from kvtransfer.handover.memory import BlockMemory, OfferSource
from kvtransfer.handover.outgoing import OutgoingTransfer
from kvtransfer.handover.peers import PeerTable
from kvtransfer.handover.send_machine import SendMachine
from kvtransfer.handover.send_path import SendPath
from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport import LocalTransports, Peer, Transport
from kvtransfer.transport.local.address import LocalAddress
from pdserve.base.errors import PeerLost, SetupError, TransferTimeout
from pdserve.base.ids import RequestId
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Share of the memory lent to all transfers that one transfer may take, so that a peer that stops reading leaves the
#: rest to others.
_MEMORY_SHARE = 1 / 4
#: Peers that are known to need no more introductions. One that was forgotten is only looked at once more.
_MAX_SETTLED = 256
#: Pause after a worker of this host could not be connected to at its local address.
_REFUSED_S = 10.0


class _Connection(NamedTuple):
    """A ticket's connection."""

    peer: Peer
    #: It has a data address, unless blocks are offered.
    ticket: Ticket
    #: As in `SendPath`.
    local: tuple[LocalTransports, OfferSource] | None = None


class Sender:
    """Every transfer out of this worker. Use it from the event loop that opened the transport."""

    def __init__(
        self,
        *,
        transport: Transport,
        memory: BlockMemory,
        layout: KvLayout,
        max_outstanding_bytes: int | None = None,
        on_peer: Callable[[Ticket, Peer], None] = lambda ticket, peer: None,
        calls: TicketCalls | None = None,
    ) -> None:
        """`max_outstanding_bytes`: per transfer; None: the memory's window.

        `on_peer` is called before each transfer with the connection that it takes, which may be an old one. `calls`:
        to the workers that granted tickets; None: they are not called, and their tickets have all that is needed.
        """
        self._transport = transport
        self._local = transport if isinstance(transport, LocalTransports) else None
        self._memory = memory
        self._layout = layout
        self._max_outstanding_bytes = max_outstanding_bytes or memory.window_bytes
        self._peers = PeerTable(transport)
        self._on_peer = on_peer
        self._calls: TicketCalls = calls or NoCalls()
        self._introductions = Introductions(transport, self._calls.introduce)
        #: The peer of each data address over which blocks have left: it needs no more introductions.
        self._settled: dict[bytes, Peer] = {}
        #: Until when local addresses that have refused this worker's memory are not tried again.
        self._refused_until: dict[tuple[LocalAddress, OfferSource], float] = {}

    def close_unused(self) -> None:
        """From now on a connection ends with the last transfer over it."""
        self._peers = PeerTable(self._transport, max_kept=0)

    @asynccontextmanager
    async def open(self, ticket: Ticket, *, request_id: RequestId) -> AsyncIterator[OutgoingTransfer]:
        """One transfer. However the block ends, nothing reads the pushed blocks any more: they may be freed.

        Leaving it without `finish` aborts the transfer. That waits for what is on the wire, as long as a message leaves
        every `ABORTED_S`, and at most for the lease.
        Raises: LayoutMismatch, TransferError when the ticket is for another transport, PeerLost, TransferTimeout.
        """
        self.require_compatible(ticket)
        machine = SendMachine(shape=ticket.shape, lease_s=ticket.lease_s, now=asyncio.get_running_loop().time())
        async with self._connected(ticket, machine.deadline) as connection:
            self._on_peer(ticket, connection.peer)
            path = SendPath(
                memory=self._memory,
                transport=self._transport,
                peer=connection.peer,
                max_outstanding=self._max_outstanding(ticket),
                local=connection.local,
            )
            transfer = OutgoingTransfer(ticket, request_id, machine, path)
            callbacks = self._answering_callbacks(connection)
            try:
                yield transfer
            finally:
                if callbacks is not None:
                    callbacks.cancel()
                await transfer.close()
                if transfer.stats.sent_bytes and path.local is None:
                    self._settle(connection.ticket.data_address, connection.peer)

    def _local_sources(self, ticket: Ticket) -> list[tuple[LocalAddress, OfferSource]]:
        """Where to offer blocks within the host, and from where; none: the workers share neither host nor memory."""
        end, memory = ticket.data_endpoint, self._memory
        if memory.offers is None or ticket.bundle_blocks != memory.bundle_blocks:
            return []
        if self._local is None or end is None or end.local is None or not self._local.reaches(end.local):
            return []
        sources, now = memory.offers.sources_for(end), asyncio.get_running_loop().time()
        return [(end.local, each) for each in sources if now >= self._refused_until.get((end.local, each), 0.0)]

    @asynccontextmanager
    async def _connected(self, ticket: Ticket, deadline: float) -> AsyncIterator[_Connection]:
        """The connection of a ticket: within the host where that works, else as between hosts."""
        async with AsyncExitStack() as stack:
            for local, source in self._local_sources(ticket):
                assert self._local is not None
                connect = partial(self._connect_locally, ticket, self._local, (local, source))
                key = local.pack() + bytes([source.shared.is_pinned])
                try:
                    peer = await stack.enter_async_context(self._peers.use(key, connect, deadline=deadline))
                except PeerLost:
                    continue
                yield _Connection(peer, ticket, (self._local, source))
                return
            ticket = await self._with_address(ticket, deadline)
            introduced = partial(self._introductions.connect, ticket)
            peer = await stack.enter_async_context(self._peers.use(ticket.data_address, introduced, deadline=deadline))
            yield _Connection(peer, ticket)

    async def _with_address(self, ticket: Ticket, deadline: float) -> Ticket:
        """The ticket with a data address. Raises: TransferTimeout, PeerLost, and what the worker answers."""
        if ticket.data_address:
            return ticket
        try:
            async with asyncio.timeout_at(deadline):
                found = await self._calls.data_address(ticket)
        except TimeoutError as error:
            raise TransferTimeout("the decode worker did not give its data address within the lease") from error
        return replace(ticket, data_address=found.address, guarded_addresses=found.guarded_addresses)

    async def _connect_locally(
        self, ticket: Ticket, transport: LocalTransports, found: tuple[LocalAddress, OfferSource]
    ) -> Peer:
        """Transfers that have waited for one that was refused do not try again."""
        if found not in self._local_sources(ticket):
            raise PeerLost("The worker has just refused another transfer.")
        local, source = found
        try:
            await source.open()
            return await transport.connect_locally(local, source.shared)
        except (PeerLost, SetupError) as error:
            log.warning("local_path_refused", peer=ticket.worker_id, reason=error)
            self._refused_until[found] = asyncio.get_running_loop().time() + _REFUSED_S
            while len(self._refused_until) > _MAX_SETTLED:
                del self._refused_until[next(iter(self._refused_until))]
            raise PeerLost(str(error)) from error

    def _answering_callbacks(self, connection: _Connection) -> asyncio.Task[None] | None:
        peer, ticket, local = connection
        if local is not None or not ticket.guarded_addresses or self._settled.get(ticket.data_address) is peer:
            return None
        return asyncio.create_task(self._introductions.answer_callbacks(ticket), name="answers to callbacks")

    def _settle(self, address: bytes, peer: Peer) -> None:
        self._settled[address] = peer
        while len(self._settled) > _MAX_SETTLED:
            del self._settled[next(iter(self._settled))]

    def require_compatible(self, ticket: Ticket) -> None:
        """Raises: LayoutMismatch, TransferError when the ticket is for another transport or kind of digest."""
        self._layout.require_equal(ticket.layout)
        if ticket.transport != self._transport.name:
            raise transfer_errors.transport_differs(ticket.transport, self._transport.name)
        if ticket.digest != self._memory.digest:
            raise transfer_errors.digest_differs(ticket.digest, self._memory.digest)

    def _max_outstanding(self, ticket: Ticket) -> int:
        """Messages that fill the window of bytes, within this transfer's share of the memory."""
        in_window = self._max_outstanding_bytes // (ticket.groups.max_block_bytes * ticket.bundle_blocks)
        lendable = self._memory.max_blocks // self._memory.bundle_blocks
        return max(1, min(in_window, int(_MEMORY_SHARE * lendable)))
