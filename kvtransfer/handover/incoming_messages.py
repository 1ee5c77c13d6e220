"""The messages of one transfer into this worker: they get memory when they are there, and are copied to their blocks.

A transfer whose prompt is being computed holds no memory. A message gives its memory back as soon as it is in its
blocks, which waits for no other message, so memory that others wait for becomes free.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvtransfer.handover import transfer_errors
from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.events import MessageLanded, MessageLost, MessagesReceived, ReceiveEvent
from kvtransfer.handover.memory import BlockMemory, Bundle, MessageSpec
from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport import Buffer, Operation, Transport
from kvtransfer.transport.local.offer import Offer
from kvtransfer.transport.offers import IncomingOffer
from pdserve.base.errors import PdserveError, TransferError
from pdserve.base.logs import get_logger
from pdserve.base.tasks import ServiceGroup

log = get_logger(__name__)


class IncomingMessages:
    """Implements `Inbox`. Messages are numbered as in `TransferShape`. Belongs to the event loop."""

    def __init__(
        self,
        ticket: Ticket,
        bundles: Sequence[Bundle],
        *,
        transport: Transport,
        memory: BlockMemory,
        tasks: ServiceGroup,
        on: Callable[[ReceiveEvent], None],
    ) -> None:
        """`bundles`: of the ticket's shape. `on` gets the events of the messages."""
        self._ticket = ticket
        self._bundles = bundles
        self._transport = transport
        self._memory = memory
        self._tasks = tasks
        self._on = on
        self._groups, self._shape = ticket.groups, ticket.shape
        self._digest = MessageDigest(ticket.key)
        #: Messages that wait for memory, and the task that waits with them.
        self._waiting: deque[int] = deque()
        self._lending: asyncio.Task[None] | None = None
        #: Messages that are received or copied from another process, or were.
        self._started: set[int] = set()
        #: Receives that were posted, and the memory of those that are not in their blocks.
        self._receives: list[Operation] = []
        self._buffers: dict[int, Buffer] = {}
        #: Messages to be copied to their blocks, and the task that does it.
        self._landed: list[int] = []
        self._storing: asyncio.Task[None] | None = None
        #: Whether the sender offers its blocks, and the offers that are being copied.
        self._is_offered = False
        self._pulls: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """From now on messages may arrive."""
        self._transport.expect(self._ticket.tag_base, self)

    def arrived(self, tag: int) -> bool:
        """Implements `Inbox`: receives the message, or lets it wait for memory behind earlier ones."""
        index = tag - self._ticket.tag_base
        if index >= self._shape.num_messages or index in self._started or index in self._waiting:
            return False
        buffer = None if self._waiting else self._memory.try_lend(self._bundle_of(index))
        if buffer is not None:
            self._receive(index, buffer)
        else:
            self._waiting.append(index)
            if self._lending is None and not self._tasks.stopping:
                self._lending = self._tasks.start(self._lend(), name="memory for messages")
        return True

    def offered(self, blocks: IncomingOffer) -> bool:
        """Implements `Inbox`: copies the messages to their blocks, behind those that were offered before."""
        offer = blocks.offer
        index = offer.first_tag - self._ticket.tag_base
        indices, group = self._shape.run(index, offer.num_messages), self._shape.layer_group_of(index)
        is_known = len(indices) == offer.num_messages and offer.tag_step == indices.step
        if not is_known or not self._started.isdisjoint(indices) or self._tasks.stopping:
            return False
        self._started.update(indices)
        self._is_offered = True
        if not self._fits(offer, indices, group):
            for index in indices:
                self._on_lost(index, TransferError("Other blocks were offered than the ticket has."))
            return False
        pull = self._tasks.start(self._pull(blocks, indices, group), name="copy offered messages")
        self._pulls.add(pull)
        pull.add_done_callback(partial(self._pulled, blocks))
        return True

    def lost(self, error: PdserveError) -> None:
        """Implements `Inbox`. A transfer whose messages are offered waits for none that are sent."""
        if self._is_offered:
            return
        self._transport.dismiss(self._ticket.tag_base)
        self._waiting.clear()
        for index in range(self._shape.num_messages):
            if index not in self._started:
                self._on_lost(index, error)

    def store(self, index: int) -> None:
        """Copies a message that has landed to its blocks, soon."""
        self._landed.append(index)
        if self._storing is None and not self._tasks.stopping:
            self._storing = self._tasks.start(self._store(), name="store messages")

    async def cancel(self) -> None:
        """Returns when no memory or block of the transfer can be written any more."""
        self._transport.dismiss(self._ticket.tag_base)
        self._waiting.clear()
        if self._lending is not None:
            self._lending.cancel()
            await asyncio.wait([self._lending])
        await self._transport.cancel(self._receives)
        for pull in self._pulls:
            pull.cancel()
        copying = [*self._pulls, *filter(None, [self._storing])]
        if copying:
            await asyncio.wait(copying)

    def end(self) -> None:
        """Nothing arrives any more, and nothing is copied: all memory is given back."""
        self._transport.dismiss(self._ticket.tag_base)
        self._receives.clear()
        for buffer in self._buffers.values():
            self._memory.give_back(buffer)
        self._buffers.clear()

    def _bundle_of(self, index: int) -> Bundle:
        return self._bundles[self._shape.bundle_of(index)]

    def _spec_of(self, group: int) -> MessageSpec:
        groups = self._groups
        return MessageSpec(layers=groups.layers[group], kv_group=groups.kv_groups[group], digest=self._digest)

    def _fits(self, offer: Offer, indices: range, group: int) -> bool:
        """Whether the receiver can copy what is offered."""
        memory, num_blocks = self._memory.offers, sum(len(self._bundle_of(index)) for index in indices)
        if memory is None or len(offer.starts) != num_blocks:
            return False
        return offer.block_bytes == memory.block_bytes(self._spec_of(group))

    async def _pull(self, blocks: IncomingOffer, indices: range, group: int) -> None:
        memory = self._memory.offers
        assert memory is not None
        bundles = [self._bundle_of(index) for index in indices]
        events: list[ReceiveEvent]
        try:
            digests = await memory.pull(blocks.memory, blocks.offer.starts, bundles, self._spec_of(group))
        except Exception as error:  # noqa: BLE001 - whatever it is, the messages have to end
            log.error("blocks_not_copied", exc=error)
            lost = TransferError(f"Blocks could not be copied: {type(error).__name__}.")
            events = [MessageLost(index=index, error=lost) for index in indices]
        else:
            events = [MessagesReceived(index=indices[0], digests=tuple(digests))]
        for event in events:
            self._on(event)

    def _pulled(self, blocks: IncomingOffer, pull: asyncio.Task[None]) -> None:
        """The offer ends however the task has ended: it may have been cancelled before its first turn."""
        self._pulls.discard(pull)
        blocks.end()

    def _receive(self, index: int, buffer: Buffer) -> None:
        message = buffer[self._groups.span(self._shape.layer_group_of(index), len(self._bundle_of(index)))]
        digest = None if self._memory.copies else self._digest
        receive = self._transport.post_receive(self._ticket.tag(index), message, digest)
        self._started.add(index)
        self._receives.append(receive)
        self._buffers[index] = buffer
        receive.add_done_callback(partial(self._on_receive_done, index))

    async def _lend(self) -> None:
        """Receives the messages that wait for memory, one after the other."""
        while self._waiting:
            index = self._waiting[0]
            [buffer] = await self._memory.lend([self._bundle_of(index)])
            if self._waiting:
                self._waiting.popleft()
                self._receive(index, buffer)
            else:  # They were lost meanwhile.
                self._memory.give_back(buffer)
        self._lending = None

    def _on_receive_done(self, index: int, receive: Operation) -> None:
        if receive.error is None and not receive.cancelled and receive.digest is None:
            self._on(MessageLanded(index=index))
            return
        self._memory.give_back(self._buffers.pop(index))
        if receive.error is not None:
            self._on_lost(index, receive.error)
        elif receive.digest is not None:
            self._on(MessagesReceived(index=index, digests=(receive.digest,)))

    def _on_lost(self, index: int, error: PdserveError) -> None:
        self._on(MessageLost(index=index, error=transfer_errors.of_transport(error)))

    async def _store(self) -> None:
        """Stores until nothing is left. Messages of a group that land during a copy are copied together later."""
        group_of = self._shape.layer_group_of
        while self._landed:
            group = group_of(self._landed[0])
            landed = [index for index in self._landed if group_of(index) == group]
            self._landed = [index for index in self._landed if group_of(index) != group]
            buffers = [self._buffers.pop(index) for index in landed]
            bundles = [self._bundle_of(index) for index in landed]
            events: list[ReceiveEvent]
            try:
                digests = await self._memory.store(bundles, buffers, self._spec_of(group))
            except TransferError as error:
                events = [MessageLost(index=index, error=error) for index in landed]
            else:
                received = zip(landed, digests, strict=True)
                events = [MessagesReceived(index=index, digests=(digest,)) for index, digest in received]
            finally:
                for buffer in buffers:
                    self._memory.give_back(buffer)
            for event in events:
                self._on(event)
        self._storing = None
