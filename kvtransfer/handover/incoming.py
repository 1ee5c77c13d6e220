"""One transfer into this worker: the I/O layer of `ReceiveMachine`, which reports its events and runs its effects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from kvtransfer.handover.events import (
    Aborted,
    AnswerCommit,
    CancelReceives,
    CommitArrived,
    ForgetAt,
    LeaseKept,
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
from kvtransfer.handover.incoming_messages import IncomingMessages
from kvtransfer.handover.memory import BlockMemory
from kvtransfer.handover.receive_machine import ReceiveMachine
from kvtransfer.handover.reservation import Received, Reservation
from kvtransfer.handover.ticket import Commit, Ticket
from kvtransfer.transport import Transport
from pdserve.base.errors import PdserveError
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
        self._tasks = tasks
        self._forget = forget
        self._loop = asyncio.get_running_loop()  # Kept: asking for it is a system call, made several times per block.
        self._shape = ticket.shape
        self._machine = ReceiveMachine(
            shape=self._shape,
            request_id=reservation.request_id,
            attempt=ticket.attempt,
            lease_s=ticket.lease_s,
            now=self._loop.time(),
        )
        self._messages = IncomingMessages(
            ticket, reservation.bundles(self._shape), transport=transport, memory=memory, tasks=tasks, on=self._handle
        )
        self._is_cancelling = False
        self._timer: asyncio.TimerHandle | None = None
        #: Commits that wait for an answer, and the answer to those that are repeated.
        self._answers: list[asyncio.Future[Received]] = []
        self._received: Received | None = None

    def start(self) -> None:
        """From now on messages may arrive."""
        self._messages.start()
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
            case StoreMessage(index=index):
                self._messages.store(index)
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

    async def _until_quiet(self) -> None:
        if self._is_cancelling:
            # Takes a bounded time. Interrupted, it would leave blocks that can never be freed.
            await run_to_completion(self._cancel_receives())

    async def _cancel_receives(self) -> None:
        await self._messages.cancel()
        if self._is_cancelling:  # Another caller may have been faster.
            self._is_cancelling = False
            self._handle(Quiet())

    def _verified(self, verified: Verified) -> None:
        self.is_over = True
        self._messages.end()
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
        self._messages.end()
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
