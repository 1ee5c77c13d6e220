"""The messages of one transfer into this worker: they get memory when they are there, and are copied to their blocks.

A transfer whose prompt is being computed holds no memory. A message gives its memory back as soon as it is in its
blocks, which waits for no other message: whoever waits for memory gets it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.events import MessageLanded, MessageLost, MessageReceived, ReceiveEvent
from kvtransfer.handover.memory import BlockMemory, Bundle, MessageSpec
from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport import Buffer, Operation, Transport
from pdserve.base.errors import PdserveError, PeerLost, TransferError
from pdserve.base.tasks import ServiceGroup


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
        #: Receives that were posted, and the memory of those that are not in their blocks.
        self._receives: dict[int, Operation] = {}
        self._buffers: dict[int, Buffer] = {}
        #: Messages to be copied to their blocks, and the task that does it.
        self._landed: list[int] = []
        self._storing: asyncio.Task[None] | None = None

    def start(self) -> None:
        """From now on messages may arrive."""
        self._transport.expect(self._ticket.tag_base, self)

    def arrived(self, tag: int) -> bool:
        """Implements `Inbox`: receives the message, or lets it wait for memory behind earlier ones."""
        index = tag - self._ticket.tag_base
        if index >= self._shape.num_messages or index in self._receives or index in self._waiting:
            return False
        buffer = None if self._waiting else self._memory.try_lend(self._bundle_of(index))
        if buffer is not None:
            self._receive(index, buffer)
        else:
            self._waiting.append(index)
            if self._lending is None and not self._tasks.stopping:
                self._lending = self._tasks.start(self._lend(), name="memory for messages")
        return True

    def lost(self, error: PdserveError) -> None:
        """Implements `Inbox`."""
        self._transport.dismiss(self._ticket.tag_base)
        self._waiting.clear()
        for index in range(self._shape.num_messages):
            if index not in self._receives:
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
        await self._transport.cancel(list(self._receives.values()))
        if self._storing is not None:
            await asyncio.wait([self._storing])

    def end(self) -> None:
        """Nothing arrives any more, and nothing is copied: all memory is given back."""
        self._transport.dismiss(self._ticket.tag_base)
        self._receives.clear()
        for buffer in self._buffers.values():
            self._memory.give_back(buffer)
        self._buffers.clear()

    def _bundle_of(self, index: int) -> Bundle:
        return self._bundles[self._shape.bundle_of(index)]

    def _receive(self, index: int, buffer: Buffer) -> None:
        message = buffer[self._groups.span(self._shape.layer_group_of(index), len(self._bundle_of(index)))]
        digest = None if self._memory.copies else self._digest
        receive = self._transport.post_receive(self._ticket.tag(index), message, digest)
        self._receives[index], self._buffers[index] = receive, buffer
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
            self._on(MessageReceived(index=index, digest=receive.digest))

    def _on_lost(self, index: int, error: PdserveError) -> None:
        lost = error if isinstance(error, TransferError) else PeerLost(str(error))
        self._on(MessageLost(index=index, error=lost))

    async def _store(self) -> None:
        """Stores until nothing is left. Messages of a group that land during a copy are copied together later."""
        group_of = self._shape.layer_group_of
        while self._landed:
            group = group_of(self._landed[0])
            landed = [index for index in self._landed if group_of(index) == group]
            self._landed = [index for index in self._landed if group_of(index) != group]
            buffers = [self._buffers.pop(index) for index in landed]
            spec = MessageSpec(
                layers=self._groups.layers[group], kv_group=self._groups.kv_groups[group], digest=self._digest
            )
            events: list[ReceiveEvent]
            try:
                digests = await self._memory.store([self._bundle_of(index) for index in landed], buffers, spec)
            except TransferError as error:
                events = [MessageLost(index=index, error=error) for index in landed]
            else:
                received = zip(landed, digests, strict=True)
                events = [MessageReceived(index=index, digest=digest) for index, digest in received]
            finally:
                for buffer in buffers:
                    self._memory.give_back(buffer)
            for event in events:
                self._on(event)
        self._storing = None
