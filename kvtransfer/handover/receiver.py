"""The decode worker's end of the handover: posts receives, hands out tickets, verifies what arrived, lets go safely."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.events import (
    Aborted,
    AnswerCommit,
    CancelReceives,
    CommitArrived,
    Effect,
    Event,
    LeaseKept,
    MessageLost,
    MessageReceived,
    Quiet,
    Released,
    TimePassed,
    Verified,
)
from kvtransfer.handover.layer_groups import Bundles, LayerGroups
from kvtransfer.handover.memory import BlockMemory, Bundle, MessageSpec
from kvtransfer.handover.receive_machine import ReceiveMachine, ReceiveState
from kvtransfer.handover.reservation import Received, ReceiverIdentity, Reservation
from kvtransfer.handover.ticket import MAX_MESSAGES, Commit, Ticket, new_key, new_tag_base
from kvtransfer.transport import Buffer, Operation, Transport
from pdserve.base.errors import (
    PdserveError,
    PeerLost,
    StaleAttempt,
    StaleEpoch,
    StaleError,
    TransferError,
)
from pdserve.base.ids import TransferId, new_transfer_id
from pdserve.base.logs import get_logger
from pdserve.base.tasks import ServiceGroup

log = get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Incoming:
    """One ticket's state."""

    reservation: Reservation
    ticket: Ticket
    machine: ReceiveMachine
    digest: MessageDigest
    groups: LayerGroups
    #: Kept: asking for the running loop is a system call.
    loop: asyncio.AbstractEventLoop
    receives: list[Operation] = field(default_factory=list)
    bundles: list[Bundle] = field(default_factory=list)
    #: Lent for bundles that are still to come, by their place in the ticket, and how many of their messages are.
    buffers: dict[int, Buffer] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    #: What has arrived and is still to be stored, by index, and who is doing it.
    arrived: list[int] = field(default_factory=list)
    storing: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    commit: Commit | None = None
    answers: list[asyncio.Future[Received]] = field(default_factory=list)
    result: Received | None = None
    started_at: float | None = None
    ended_at: float = 0.0
    #: The reservation lives on under another ticket, or its owner let go of it: nobody to tell.
    disowned: bool = False


class Receiver:
    """Every transfer into this worker. Use it from the event loop that opened the transport."""

    def __init__(
        self, *, transport: Transport, memory: BlockMemory, identity: ReceiverIdentity, tasks: ServiceGroup
    ) -> None:
        self._transport = transport
        self._memory = memory
        self._identity = identity
        self._tasks = tasks
        self._incoming: dict[TransferId, _Incoming] = {}

    @property
    def num_transfers(self) -> int:
        """Tickets whose blocks can still be written."""
        open_states = (ReceiveState.COMMITTED, ReceiveState.RELEASED)
        return sum(incoming.machine.state not in open_states for incoming in self._incoming.values())

    async def grant(self, reservation: Reservation, *, attempt: int) -> Ticket:
        """Posts a receive for every message, then returns the ticket for them.

        Raises: SetupError when the transport does not come up; NoFreeBlocks when the blocks can never be received.
        """
        num_messages = len(reservation.block_ids) * self._identity.layer_groups
        if num_messages > MAX_MESSAGES:
            raise ValueError(f"a ticket is for at most {MAX_MESSAGES} messages, not {num_messages}")
        bundles = Bundles(num_blocks=len(reservation.block_ids), size=self._memory.bundle_blocks)
        lent_for = bundles.of(reservation.block_ids)
        buffers = await self._memory.lend(lent_for)
        try:
            # Now, not before: it may be another one after the wait.
            address = await self._transport.listen()
        except BaseException:
            for buffer in buffers:
                self._memory.give_back(buffer)
            raise
        ticket = Ticket(
            transfer_id=new_transfer_id(),
            attempt=attempt,
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            grpc_address=self._identity.grpc_address,
            transport=self._transport.name,
            data_address=address,
            first_block=reservation.first_block,
            num_blocks=len(reservation.block_ids),
            layout=self._identity.layout,
            lease_s=reservation.lease_s,
            key=new_key(),
            tag_base=new_tag_base(),
            layer_groups=self._identity.layer_groups,
            bundle_blocks=bundles.size,
            digest=self._memory.digest,
        )
        loop = asyncio.get_running_loop()
        machine = ReceiveMachine(
            num_bundles=bundles.count,
            layer_groups=ticket.layer_groups,
            attempt=attempt,
            lease_s=ticket.lease_s,
            now=loop.time(),
            unit=bundles.unit,
        )
        incoming = _Incoming(reservation, ticket, machine, MessageDigest(ticket.key), ticket.groups, loop)
        incoming.bundles = lent_for
        self._incoming[ticket.transfer_id] = incoming
        incoming.buffers = dict(enumerate(buffers))
        incoming.missing = dict.fromkeys(incoming.buffers, ticket.layer_groups)
        messages = (
            buffer[incoming.groups.span(group, len(bundle))]
            for bundle, buffer in zip(lent_for, buffers, strict=True)
            for group in range(incoming.groups.count)
        )
        for index, message in enumerate(messages):
            receive = self._transport.post_receive(ticket.tag(index), message)
            incoming.receives.append(receive)
            receive.add_done_callback(partial(self._on_receive_done, incoming, index))
        self._watch_lease(incoming)
        return ticket

    def keep_lease(self, transfer_id: TransferId) -> None:
        """The prefill worker computes: its silence on the wire is progress. Unknown transfers are ignored."""
        incoming = self._incoming.get(transfer_id)
        if incoming is not None:
            self._handle(incoming, LeaseKept())

    async def commit(self, commit: Commit) -> Received:
        """Waits, at most for the lease, for messages that the commit has overtaken, and verifies all of them.

        `Reservation.on_received` has been called when it returns. A repeated commit gets the same answer.
        Raises: StaleEpoch, StaleAttempt, StaleError for a transfer that is over; DigestMismatch for a wrong MAC (the
            transfer goes on) or wrong bytes (no commit of it will succeed); PeerLost; TransferTimeout.
        """
        if commit.epoch != self._identity.epoch:
            raise StaleEpoch(f"worker {self._identity.worker_id} has been restarted since it granted the ticket")
        incoming = self._incoming.get(commit.transfer_id)
        if incoming is None:
            raise StaleError(f"no such transfer for request {commit.request_id}: it was given up or never granted")
        commit.require_authentic(incoming.ticket.key)
        if commit.request_id != incoming.reservation.request_id:
            raise StaleError(f"the ticket was granted to request {incoming.reservation.request_id}")
        if commit.attempt != incoming.ticket.attempt:
            raise StaleAttempt(f"the commit is of attempt {commit.attempt}, the ticket of {incoming.ticket.attempt}")
        if incoming.commit is not None and incoming.commit != commit:
            raise StaleAttempt("another commit of this transfer came first")
        incoming.commit = commit
        answer: asyncio.Future[Received] = incoming.loop.create_future()
        incoming.answers.append(answer)
        try:
            self._handle(incoming, CommitArrived(attempt=commit.attempt, digests=commit.digests))
            return await answer
        finally:
            if answer in incoming.answers:
                incoming.answers.remove(answer)

    async def abort(self, transfer_id: TransferId) -> None:
        """Withdraws a transfer. When it returns or raises, nothing writes to its blocks any more.

        A transfer that is over already is left alone. A cancelled caller still waits for the blocks to be quiet.
        """
        incoming = self._incoming.get(transfer_id)
        if incoming is None or incoming.machine.state is ReceiveState.COMMITTED:
            return
        incoming.disowned = True
        self._handle(incoming, Aborted())
        await self._cancel(incoming)

    async def renew(self, transfer_id: TransferId, *, attempt: int) -> Ticket:
        """A fresh ticket for the same blocks, after the prefill worker was lost. The old one is dead before it returns.

        When it raises anything but StaleError, the reservation is over and its blocks are quiet.
        Raises: StaleError when the reservation is over already (expired, aborted or committed).
        """
        incoming = self._incoming.get(transfer_id)
        ended = (ReceiveState.COMMITTED, ReceiveState.RELEASED, ReceiveState.CANCELLING)
        if incoming is None or incoming.machine.state in ended:
            raise StaleError("the reservation is over")
        if attempt <= incoming.ticket.attempt:
            raise StaleAttempt(f"attempt {attempt} is not newer than the ticket's, {incoming.ticket.attempt}")
        await self.abort(transfer_id)
        return await self.grant(incoming.reservation, attempt=attempt)

    async def close(self) -> None:
        """Aborts every transfer; the blocks are quiet when it returns."""
        for transfer_id in list(self._incoming):
            await self.abort(transfer_id)
        for incoming in self._incoming.values():
            if incoming.timer is not None:
                incoming.timer.cancel()
        self._incoming.clear()

    # Events in.
    def _on_receive_done(self, incoming: _Incoming, index: int, receive: Operation) -> None:
        state = incoming.machine.state
        if receive.cancelled or state is ReceiveState.RELEASED:
            return
        if receive.error is not None:
            error = receive.error if isinstance(receive.error, TransferError) else PeerLost(str(receive.error))
            self._handle(incoming, MessageLost(index=index, error=error))
            return
        now = incoming.loop.time()
        incoming.started_at = now if incoming.started_at is None else incoming.started_at
        incoming.ended_at = now
        if not self._memory.copies:
            # Inline: a block is digested in 13 us from a warm cache, a hop to a thread and back takes five times that.
            self._stored(incoming, index, incoming.digest(receive.buffer))
            return
        incoming.arrived.append(index)
        # Where nothing is started any more, nobody will want it: `close` comes next.
        if incoming.storing is None and not self._tasks.stopping:
            name = f"store {incoming.reservation.request_id}"
            incoming.storing = self._tasks.start(self._store(incoming), name=name)

    async def _store(self, incoming: _Incoming) -> None:
        """Until nothing is left: what arrives of a group during a copy is copied together in one of the next."""
        count = incoming.groups.count
        while incoming.arrived:
            group = incoming.arrived[0] % count
            arrived = [index for index in incoming.arrived if index % count == group]
            incoming.arrived = [index for index in incoming.arrived if index % count != group]
            places = [index // count for index in arrived]
            bundles = [incoming.bundles[place] for place in places]
            spec = MessageSpec(layers=incoming.groups.layers[group], digest=incoming.digest)
            try:
                digests = await self._memory.store(bundles, [incoming.buffers[place] for place in places], spec)
            except TransferError as error:
                for index in arrived:
                    self._handle(incoming, MessageLost(index=index, error=error))
            else:
                for index, digest in zip(arrived, digests, strict=True):
                    self._stored(incoming, index, digest)
        incoming.storing = None

    def _stored(self, incoming: _Incoming, index: int, digest: bytes) -> None:
        place = index // incoming.groups.count
        incoming.missing[place] -= 1
        if not incoming.missing[place]:
            self._memory.give_back(incoming.buffers.pop(place))
        self._handle(incoming, MessageReceived(index=index, digest=digest))

    def _watch_lease(self, incoming: _Incoming) -> None:
        incoming.timer = incoming.loop.call_at(incoming.machine.deadline, self._on_timer, incoming)

    def _on_timer(self, incoming: _Incoming) -> None:
        incoming.timer = None
        self._handle(incoming, TimePassed())
        if incoming.machine.state in (ReceiveState.RECEIVING, ReceiveState.COMMITTING, ReceiveState.BROKEN):
            self._watch_lease(incoming)

    def _handle(self, incoming: _Incoming, event: Event) -> None:
        for effect in incoming.machine.handle(event, incoming.loop.time()):
            self._do(incoming, effect)

    # Effects out.
    def _do(self, incoming: _Incoming, effect: Effect) -> None:
        match effect:
            # Else `abort` is doing it, or will.
            case CancelReceives() if not incoming.disowned and not self._tasks.stopping:
                self._tasks.start(self._cancel(incoming), name=f"cancel {incoming.reservation.request_id}")
            case Verified():
                self._verified(incoming)
            case AnswerCommit(error=error):
                self._answer(incoming, error)
            case Released(error=error):
                self._released(incoming, error)

    async def _cancel(self, incoming: _Incoming) -> None:
        """Not to be interrupted: it takes a bounded time, and half of it would leave blocks that nobody may free."""
        cancelled: asyncio.CancelledError | None = None
        while incoming.machine.state is ReceiveState.CANCELLING:
            try:
                await self._transport.cancel(incoming.receives)
                if incoming.storing is not None:
                    await asyncio.wait([incoming.storing])
            except asyncio.CancelledError as error:
                cancelled = error
            else:
                # Whoever else is cancelling the same transfer may have been faster.
                if incoming.machine.state is ReceiveState.CANCELLING:
                    self._handle(incoming, Quiet())
        if cancelled is not None:
            raise cancelled

    def _verified(self, incoming: _Incoming) -> None:
        assert incoming.commit is not None
        began = incoming.started_at if incoming.started_at is not None else incoming.ended_at
        incoming.result = Received(
            request_id=incoming.reservation.request_id,
            transfer_id=incoming.ticket.transfer_id,
            first_tokens=incoming.commit.first_tokens,
            received_blocks=incoming.ticket.num_blocks,
            received_bytes=sum(receive.buffer.nbytes for receive in incoming.receives),
            receive_s=incoming.ended_at - began,
        )
        incoming.receives.clear()
        if incoming.timer is not None:
            incoming.timer.cancel()
        # Remembered for another lease, for the sake of repeated commits.
        incoming.timer = incoming.loop.call_later(incoming.ticket.lease_s, self._forget, incoming)
        incoming.reservation.on_received(incoming.result)

    def _answer(self, incoming: _Incoming, error: PdserveError | None) -> None:
        answers = [answer for answer in incoming.answers if not answer.done()]
        for answer in answers:
            if error is not None:
                answer.set_exception(error)
            else:
                assert incoming.result is not None
                answer.set_result(incoming.result)

    def _released(self, incoming: _Incoming, error: PdserveError | None) -> None:
        self._forget(incoming)
        for buffer in incoming.buffers.values():
            self._memory.give_back(buffer)
        incoming.buffers.clear()
        if not incoming.disowned:
            assert error is not None, "only an abort ends a transfer without an error"
            log.info("transfer_expired", request_id=incoming.reservation.request_id, reason=error)
            incoming.reservation.on_expired(error)

    def _forget(self, incoming: _Incoming) -> None:
        if incoming.timer is not None:
            incoming.timer.cancel()
            incoming.timer = None
        self._incoming.pop(incoming.ticket.transfer_id, None)
