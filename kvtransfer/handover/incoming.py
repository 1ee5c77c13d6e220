"""One transfer into this worker: the I/O layer of `ReceiveMachine`, which posts receives and runs its effects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.events import (
    Aborted,
    AnswerCommit,
    CancelReceives,
    CommitArrived,
    ForgetAt,
    GiveBack,
    LeaseKept,
    MessageLanded,
    MessageLost,
    MessageReceived,
    Quiet,
    ReceiveEffect,
    ReceiveEvent,
    Released,
    StoreMessage,
    TicketRenewed,
    TimePassed,
    Verified,
    WatchLease,
)
from kvtransfer.handover.memory import BlockMemory, MessageSpec
from kvtransfer.handover.receive_machine import ReceiveMachine
from kvtransfer.handover.reservation import Received, Reservation
from kvtransfer.handover.ticket import Commit, Ticket
from kvtransfer.transport import Buffer, Operation, Transport
from pdserve.base.errors import PdserveError, PeerLost, TransferError
from pdserve.base.logs import get_logger
from pdserve.base.tasks import ServiceGroup, run_to_completion

log = get_logger(__name__)


class IncomingTransfer:
    """One ticket and the blocks reserved for it. Belongs to the event loop."""

    def __init__(
        self,
        ticket: Ticket,
        reservation: Reservation,
        *,
        transport: Transport,
        memory: BlockMemory,
        tasks: ServiceGroup,
        forget: Callable[[Ticket], None],
    ) -> None:
        """`forget` is called when no commit of the ticket is to be answered any more."""
        self.reservation = reservation
        #: Nothing can write to the blocks any more: they were verified or released.
        self.is_over = False
        self._ticket = ticket
        self._transport = transport
        self._memory = memory
        self._tasks = tasks
        self._forget = forget
        self._loop = asyncio.get_running_loop()  # Kept: asking for it is a system call, made several times per block.
        self._groups, self._shape, self._bundles = ticket.groups, ticket.shape, reservation.bundles(ticket.shape)
        self._machine = ReceiveMachine(
            shape=self._shape,
            request_id=reservation.request_id,
            attempt=ticket.attempt,
            lease_s=ticket.lease_s,
            now=self._loop.time(),
        )
        self._digest = MessageDigest(ticket.key)
        #: Buffers lent for bundles that are not complete, by bundle.
        self._buffers: dict[int, Buffer] = {}
        self._receives: list[Operation] = []
        #: Messages to be stored, and the task that stores them.
        self._landed: list[int] = []
        self._storing: asyncio.Task[None] | None = None
        self._is_cancelling = False
        self._timer: asyncio.TimerHandle | None = None
        #: Commits that wait for an answer, and the answer to those that are repeated.
        self._answers: list[asyncio.Future[Received]] = []
        self._received: Received | None = None

    def start(self, buffers: Sequence[Buffer]) -> None:
        """Posts a receive for every message. `buffers`: lent for the ticket's bundles; the transfer gives them back."""
        self._buffers = dict(enumerate(buffers))
        sizes, span = [len(bundle) for bundle in self._bundles], self._groups.span
        digest = None if self._memory.copies else self._digest
        messages = (buffers[bundle][span(group, sizes[bundle])] for bundle, group in self._shape.messages())
        for index, message in enumerate(messages):
            receive = self._transport.post_receive(self._ticket.tag(index), message, digest)
            self._receives.append(receive)
            receive.add_done_callback(partial(self._on_receive_done, index))
        self._handle(TimePassed())

    def keep_lease(self) -> None:
        """The prompt is being computed: silence on the wire is progress."""
        self._handle(LeaseKept())

    async def commit(self, commit: Commit) -> Received:
        """Waits for the machine's answer. Raises as `Receiver.commit` does."""
        commit.require_authentic(self._ticket.key)
        answer: asyncio.Future[Received] = self._loop.create_future()
        self._answers.append(answer)
        try:
            self._handle(
                CommitArrived(
                    request_id=commit.request_id,
                    attempt=commit.attempt,
                    digests=commit.digests,
                    first_tokens=commit.first_tokens,
                    numerics_class=commit.numerics_class,
                )
            )
            return await answer
        finally:
            self._answers.remove(answer)

    async def abort(self) -> None:
        """Ends the transfer, unless it is over. Nothing writes to its blocks when it returns or raises."""
        self._handle(Aborted())
        await self._until_quiet()

    async def end_for(self, attempt: int) -> None:
        """Ends the transfer so that its blocks can get a ticket for a newer attempt.

        Raises: StaleError when it is over already; StaleAttempt when `attempt` is not newer.
        """
        self._handle(TicketRenewed(attempt=attempt))
        await self._until_quiet()

    async def close(self) -> None:
        """Ends the transfer and leaves no timer behind."""
        await self.abort()
        self._cancel_timer()

    # Events in.
    def _on_receive_done(self, index: int, receive: Operation) -> None:
        if receive.cancelled:
            return
        if receive.error is not None:
            error = receive.error if isinstance(receive.error, TransferError) else PeerLost(str(receive.error))
            self._handle(MessageLost(index=index, error=error))
        elif receive.digest is None:
            self._handle(MessageLanded(index=index))
        else:
            self._handle(MessageReceived(index=index, digest=receive.digest))

    def _on_timer(self) -> None:
        self._timer = None
        self._handle(TimePassed())
        # A service that is stopping starts no tasks; it closes the receiver, which waits for the blocks to be quiet.
        if self._is_cancelling and not self._tasks.stopping:
            self._tasks.start(self._until_quiet(), name=f"cancel {self.reservation.request_id}")

    def _handle(self, event: ReceiveEvent) -> None:
        for effect in self._machine.handle(event, self._loop.time()):
            self._run(effect)

    # Effects out.
    def _run(self, effect: ReceiveEffect) -> None:
        match effect:
            case GiveBack(bundle=bundle):
                self._memory.give_back(self._buffers.pop(bundle))
            case StoreMessage(index=index):
                self._store_soon(index)
            case WatchLease(until=until):
                self._set_timer(until, self._on_timer)
            case CancelReceives():
                self._is_cancelling = True
            case Verified():
                self._verified(effect)
            case AnswerCommit(error=error):
                self._answer(error)
            case ForgetAt(at=at):
                self._set_timer(at, partial(self._forget, self._ticket))
            case Released(error=error):
                self._released(error)

    def _store_soon(self, index: int) -> None:
        self._landed.append(index)
        if self._storing is None and not self._tasks.stopping:
            self._storing = self._tasks.start(self._store(), name=f"store {self.reservation.request_id}")

    async def _store(self) -> None:
        """Stores until nothing is left. Messages of a group that land during a copy are copied together later."""
        group_of, bundle_of = self._shape.layer_group_of, self._shape.bundle_of
        while self._landed:
            group = group_of(self._landed[0])
            landed = [index for index in self._landed if group_of(index) == group]
            self._landed = [index for index in self._landed if group_of(index) != group]
            bundles = [self._bundles[bundle_of(index)] for index in landed]
            buffers = [self._buffers[bundle_of(index)] for index in landed]
            spec = MessageSpec(
                layers=self._groups.layers[group], kv_group=self._groups.kv_groups[group], digest=self._digest
            )
            try:
                digests = await self._memory.store(bundles, buffers, spec)
            except TransferError as error:
                for index in landed:
                    self._handle(MessageLost(index=index, error=error))
            else:
                for index, digest in zip(landed, digests, strict=True):
                    self._handle(MessageReceived(index=index, digest=digest))
        self._storing = None

    async def _until_quiet(self) -> None:
        if self._is_cancelling:
            # Takes a bounded time. Interrupted, it would leave blocks that can never be freed.
            await run_to_completion(self._cancel_receives())

    async def _cancel_receives(self) -> None:
        await self._transport.cancel(self._receives)
        if self._storing is not None:
            await asyncio.wait([self._storing])
        if self._is_cancelling:  # Another caller may have been faster.
            self._is_cancelling = False
            self._handle(Quiet())

    def _verified(self, verified: Verified) -> None:
        self.is_over = True
        self._receives.clear()
        self._received = Received(
            request_id=self.reservation.request_id,
            transfer_id=self._ticket.transfer_id,
            first_tokens=verified.first_tokens,
            received_blocks=self._shape.num_blocks,
            received_bytes=self._shape.num_blocks * self._ticket.layout.block_bytes,
            receive_s=verified.receive_s,
            numerics_class=verified.numerics_class,
        )
        self.reservation.on_received(self._received)

    def _answer(self, error: PdserveError | None) -> None:
        for answer in self._answers:
            if answer.done():
                continue
            if error is not None:
                answer.set_exception(error)
            else:
                assert self._received is not None, "a commit is accepted after its transfer was verified"
                answer.set_result(self._received)

    def _released(self, error: PdserveError | None) -> None:
        self.is_over = True
        self._cancel_timer()
        self._forget(self._ticket)
        for buffer in self._buffers.values():
            self._memory.give_back(buffer)
        self._buffers.clear()
        if error is not None:
            log.info("transfer_expired", request_id=self.reservation.request_id, reason=error)
            self.reservation.on_expired(error)

    def _set_timer(self, at: float, callback: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.call_at(at, callback)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
