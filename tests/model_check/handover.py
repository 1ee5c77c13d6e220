"""The handover as a model: `SendMachine`, `ReceiveMachine`, and between them a wire that loses, damages and repeats.

Blocks are reserved for one transfer. Its ticket may be renewed, which makes a transfer of a newer attempt for the same
blocks. Senders of older attempts may go on, fall silent or die. Time has two values: now, and after every lease.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from kvtransfer.handover import events
from kvtransfer.handover.layer_groups import TransferShape
from kvtransfer.handover.receive_machine import ReceiveMachine, ReceiveState
from kvtransfer.handover.send_machine import SendMachine, SendState
from pdserve.base.errors import InvalidTransition, PdserveError, PeerLost, StaleError, TransferError
from pdserve.base.ids import RequestId
from tests.model_check.frozen import cloned, key_of
from tests.model_check.search import Broken

_REQUEST = RequestId("r")
_NOW, _LATER, _LEASE_S = 0.0, 2.0, 1.0
_NOT_IN_KEY = frozenset(
    {"_story", "_transitions", "wire_time", "deadline", "_shape", "_indices", "_request_id", "_lease_s"}
)
_OVER = (ReceiveState.COMMITTED, ReceiveState.RELEASED)
_HOLDING = (ReceiveState.RECEIVING, ReceiveState.COMMITTING, ReceiveState.BROKEN)


@dataclass(frozen=True)
class Bounds:
    """How often what may happen or not happens at most."""

    num_blocks: int = 2
    layer_groups: int = 1
    #: Messages are copied to their blocks after they have arrived.
    copies: bool = False
    #: They are not sent but offered: the copy is made from the sender's blocks, which it may have let go meanwhile.
    offers: bool = False
    #: A message arrives and is sent in one action, and answers are not lost: fewer states, less seen.
    is_coarse: bool = False
    renewals: int = 1
    damages: int = 1
    losses: int = 1
    aborts: int = 1
    deaths: int = 1
    repeated_commits: int = 1
    stray_commits: int = 1

    @property
    def shape(self) -> TransferShape:
        """The shape of every ticket."""
        return TransferShape.of(num_blocks=[self.num_blocks], bundle_blocks=1, layer_groups=[self.layer_groups])


@dataclass(frozen=True)
class _Message:
    index: int
    digest: bytes
    has_arrived: bool = False
    is_sent: bool = False


class _Transfer:
    """One attempt: both machines and what is on its way between them."""

    def __init__(self, attempt: int, bounds: Bounds) -> None:
        self.attempt = attempt
        self.receive = ReceiveMachine(
            shape=bounds.shape, request_id=_REQUEST, attempt=attempt, lease_s=_LEASE_S, now=_NOW
        )
        self.send: SendMachine | None = None
        self.has_started = False
        self.is_cancelling = False
        #: Receives that wait for their message.
        self.posted = set(range(bounds.shape.num_messages))
        #: Messages that arrived and are being copied, with their digests.
        self.copying: dict[int, bytes] = {}
        #: Offered messages of which the sender is told that they are read no more.
        self.taken: set[int] = set()
        self.wire: tuple[_Message, ...] = ()
        self.commits: tuple[int, ...] = ()
        self.answers: tuple[bool, ...] = ()
        #: What was written to the blocks, by message.
        self.written: dict[int, bytes] = {}
        self._key: int | None = None

    def copy(self) -> _Transfer:
        twin = cloned(self)
        twin._key = None
        twin.receive = cloned(self.receive)
        twin.send = None if self.send is None else cloned(self.send, shared=frozenset({"wire_time"}))
        return twin

    def key(self) -> int:
        """A number for each different transfer."""
        if self._key is None:
            send = None if self.send is None else key_of(self.send, without=_NOT_IN_KEY)
            own = key_of(self, without=_MACHINES)
            key = key_of(self.receive, without=_NOT_IN_KEY), send, own
            self._key = _numbers.setdefault(key, len(_numbers))
        return self._key


_MACHINES = frozenset({"receive", "send", "_key"})
#: Numbers of the transfers seen so far.
_numbers: dict[Hashable, int] = {}
_Act = Callable[["HandoverWorld"], None]


class HandoverWorld:
    """A state of the model. Implements `tests.model_check.search.World`."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.left = bounds
        self.transfers = [_Transfer(1, bounds)]
        #: The attempt whose transfer owns the blocks; "free" or "running" afterwards.
        self.owner: int | str = 1
        self.is_renewing = False

    def key(self) -> Hashable:
        return self.left, self.owner, self.is_renewing, tuple(transfer.key() for transfer in self.transfers)

    @property
    def is_final(self) -> bool:
        senders_are_done = all(t.send is None or t.send.state is SendState.CLOSED for t in self.transfers)
        return senders_are_done and isinstance(self.owner, str)

    def successors(self) -> Iterator[tuple[str, bool, HandoverWorld]]:
        for name, is_fair, at, act in self._actions():
            after = self._copy(at)
            try:
                act(after)
                after._check()
            except (AssertionError, InvalidTransition, Broken) as error:
                raise Broken(f"{name}: {error}") from error
            yield name, is_fair, after

    def _copy(self, at: int) -> HandoverWorld:
        """To change transfer `at`."""
        twin = cloned(self)
        twin.transfers[at] = self.transfers[at].copy()
        return twin

    def _spend(self, name: str) -> None:
        self.left = replace(self.left, **{name: getattr(self.left, name) - 1})

    def _check(self) -> None:
        owning = [t.attempt for t in self.transfers if t.receive.state not in _OVER]
        if len(owning) > 1:
            raise Broken(f"the blocks have two owners: attempts {owning}")
        for transfer in self.transfers:
            send = transfer.send
            reading = [each for each in transfer.wire if not each.is_sent]
            if send is not None and send.state is SendState.CLOSED and reading:
                raise Broken("a sender has let its blocks go, and the wire still reads them")

    # What can happen.
    def _actions(self) -> Iterator[tuple[str, bool, int, _Act]]:
        for at, transfer in enumerate(self.transfers):
            yield from self._of_sender(at, transfer)
            yield from self._of_wire(at, transfer)
            yield from self._of_receiver(at, transfer)
        last, at = self.transfers[-1], len(self.transfers) - 1
        if self.left.renewals and last.receive.state in _HOLDING:
            yield f"renew {at}", False, at, lambda world: world._renew(at)
        if self.left.aborts and last.receive.state not in _OVER:
            yield f"abort {at}", False, at, lambda world: world._abort(at)
        if self.left.stray_commits and at and self.transfers[0].send is not None:
            yield "stray-commit", False, at, lambda world: world._stray_commit()

    def _of_sender(self, at: int, transfer: _Transfer) -> Iterator[tuple[str, bool, int, _Act]]:
        send = transfer.send
        if send is None:
            if not transfer.has_started:
                yield f"start-sender {at}", False, at, lambda world: world._start(at)
            return
        if send.state is SendState.SENDING:
            for group in range(self.bounds.layer_groups):
                if send.next_index(group) is not None:
                    yield f"send {at} {group}", False, at, lambda world, group=group: world._send(at, group, b"good")
                    if self.left.damages:
                        yield (
                            f"damage {at} {group}",
                            False,
                            at,
                            lambda world, group=group: world._send(at, group, b"bad"),
                        )
            if not send.num_unsent:
                yield f"all-sent {at}", False, at, lambda world: world._all_sent(at)
        if send.state is not SendState.CLOSED:
            yield f"sender-times-out {at}", True, at, lambda world: world._to_sender(at, events.TimePassed(), _LATER)
            if self.left.deaths:
                yield f"sender-dies {at}", False, at, lambda world: world._die(at)
            if self.left.aborts:
                yield f"sender-aborts {at}", False, at, lambda world: world._sender_aborts(at)

    def _of_wire(self, at: int, transfer: _Transfer) -> Iterator[tuple[str, bool, int, _Act]]:
        for message in transfer.wire:
            if not message.has_arrived:
                yield f"arrive {at} {message.index}", True, at, lambda world, each=message: world._arrive(at, each)
                if self.left.losses:
                    yield f"lose {at} {message.index}", False, at, lambda world, each=message: world._lose(at, each)
                    yield f"fail {at} {message.index}", False, at, lambda world, each=message: world._fail(at, each)
            if not message.is_sent and self._may_be_sent(transfer, message):
                yield f"sent {at} {message.index}", True, at, lambda world, each=message: world._sent(at, each)
        if transfer.commits:
            yield f"commit {at}", True, at, lambda world: world._commit(at, is_repeated=False)
            if self.left.repeated_commits:
                yield f"repeat-commit {at}", False, at, lambda world: world._commit(at, is_repeated=True)
        if transfer.answers:
            yield f"answer {at}", True, at, lambda world: world._answer(at)
            if not self.bounds.is_coarse:
                yield f"lose-answer {at}", False, at, lambda world: world._lose_answer(at)

    def _may_be_sent(self, transfer: _Transfer, message: _Message) -> bool:
        if self.bounds.offers:
            is_disconnected = transfer.send is not None and transfer.send._disconnected
            return message.index in transfer.taken or is_disconnected
        return message.has_arrived or not self.bounds.is_coarse

    def _of_receiver(self, at: int, transfer: _Transfer) -> Iterator[tuple[str, bool, int, _Act]]:
        for index in transfer.copying:
            yield f"copied {at} {index}", True, at, lambda world, index=index: world._copied(at, index)
        if transfer.is_cancelling and not transfer.copying:
            yield f"quiet {at}", True, at, lambda world: world._quiet(at)
        if transfer.receive.state in _HOLDING:
            yield f"lease-ends {at}", True, at, lambda world: world._to_receiver(at, events.TimePassed(), _LATER)

    # Acts of senders.
    def _start(self, at: int) -> None:
        transfer = self.transfers[at]
        transfer.send = SendMachine(shape=self.bounds.shape, lease_s=_LEASE_S, now=_NOW)
        transfer.has_started = True

    def _send(self, at: int, group: int, content: bytes) -> None:
        transfer = self.transfers[at]
        assert transfer.send is not None
        index = transfer.send.next_index(group)
        assert index is not None
        if content == b"bad":
            self._spend("damages")
        self._to_sender(at, events.SendStarted(index=index))
        if transfer.send.state is SendState.SENDING:
            transfer.wire += (_Message(index, content),)

    def _all_sent(self, at: int) -> None:
        self._to_sender(at, events.AllSent())
        transfer = self.transfers[at]
        if transfer.send is not None and transfer.send.state is SendState.COMMITTING:
            transfer.commits += (transfer.attempt,)

    def _die(self, at: int) -> None:
        self._spend("deaths")
        transfer = self.transfers[at]
        transfer.send, transfer.answers = None, ()
        transfer.wire = tuple(replace(each, is_sent=True) for each in transfer.wire if not each.has_arrived)

    def _sender_aborts(self, at: int) -> None:
        self._spend("aborts")
        self._to_sender(at, events.Aborted())

    def _to_sender(self, at: int, event: events.SendEvent, now: float = _NOW) -> None:
        send = self.transfers[at].send
        if send is not None:
            send.handle(event, now)

    # Acts of the wire.
    def _change(self, at: int, message: _Message, **changes: bool) -> None:
        wire = []
        for each in self.transfers[at].wire:
            changed = replace(each, **changes) if each.index == message.index else each
            if not (changed.has_arrived and changed.is_sent):
                wire.append(changed)
        self.transfers[at].wire = tuple(wire)

    def _arrive(self, at: int, message: _Message) -> None:
        self._change(at, message, has_arrived=True)
        transfer = self.transfers[at]
        if self.bounds.is_coarse and not self.bounds.offers:
            self._sent(at, message)
        if message.index not in transfer.posted:
            transfer.taken.add(message.index)
            return  # Withdrawn: the transport drops it.
        transfer.posted.discard(message.index)
        if self.bounds.offers:
            transfer.copying[message.index] = message.digest
        elif not self.bounds.copies:
            self._write(transfer, message.index, message.digest)
            self._to_receiver(at, events.MessagesReceived(index=message.index, digests=(message.digest,)))
        else:
            for effect in self._to_receiver(at, events.MessageLanded(index=message.index)):
                assert isinstance(effect, events.StoreMessage)
                transfer.copying[message.index] = message.digest

    def _copied(self, at: int, index: int) -> None:
        transfer = self.transfers[at]
        digest = transfer.copying.pop(index)
        transfer.taken.add(index)
        if self.bounds.offers and transfer.send is not None and transfer.send.state is SendState.CLOSED:
            digest = b"of another prompt"
        self._write(transfer, index, digest)
        self._to_receiver(at, events.MessagesReceived(index=index, digests=(digest,)))

    def _write(self, transfer: _Transfer, index: int, content: bytes) -> None:
        if self.owner != transfer.attempt:
            raise Broken(f"attempt {transfer.attempt} writes to blocks that are {self.owner!r}")
        transfer.written[index] = content

    def _lose(self, at: int, message: _Message) -> None:
        self._spend("losses")
        self._change(at, message, has_arrived=True)

    def _fail(self, at: int, message: _Message) -> None:
        self._lose(at, message)
        transfer = self.transfers[at]
        if message.index in transfer.posted:
            transfer.posted.discard(message.index)
            self._to_receiver(at, events.MessageLost(index=message.index, error=TransferError("cut short")))

    def _sent(self, at: int, message: _Message) -> None:
        self._change(at, message, is_sent=True)
        send = self.transfers[at].send
        error = PeerLost("disconnected") if send is not None and send._disconnected else None
        self._to_sender(at, events.SendDone(index=message.index, error=error))

    def _commit(self, at: int, *, is_repeated: bool) -> None:
        transfer = self.transfers[at]
        attempt = transfer.commits[0]
        if is_repeated:
            self._spend("repeated_commits")
        else:
            transfer.commits = transfer.commits[1:]
        digests = (b"good",) * self.bounds.shape.num_messages
        self._hand_in(at, at, attempt, digests)

    def _stray_commit(self) -> None:
        """The first attempt's commit reaches the transfer of a newer one."""
        self._spend("stray_commits")
        before = self.transfers[-1].receive.state
        self._hand_in(len(self.transfers) - 1, None, 1, (b"good",) * self.bounds.shape.num_messages)
        if self.transfers[-1].receive.state is not before:
            raise Broken("a stale attempt's commit has changed the transfer of a newer one")

    def _hand_in(self, at: int, sender: int | None, attempt: int, digests: tuple[bytes, ...]) -> None:
        commit = events.CommitArrived(request_id=_REQUEST, attempt=attempt, digests=digests, first_tokens=(1,))
        try:
            if self.transfers[at].receive.state is ReceiveState.RELEASED:
                raise StaleError("the transfer is unknown")
            self._to_receiver(at, commit)
        except StaleError:
            if sender is not None:
                self._answered(sender, is_good=False)

    def _answered(self, at: int, *, is_good: bool) -> None:
        if self.transfers[at].send is not None:
            self.transfers[at].answers += (is_good,)

    def _answer(self, at: int) -> None:
        transfer = self.transfers[at]
        is_good, transfer.answers = transfer.answers[0], transfer.answers[1:]
        error: PdserveError | None = None if is_good else TransferError("refused")
        self._to_sender(at, events.CommitAnswered(error=error))

    def _lose_answer(self, at: int) -> None:
        self.transfers[at].answers = self.transfers[at].answers[1:]

    # Acts of the receiver and of its router.
    def _renew(self, at: int) -> None:
        self._spend("renewals")
        self.is_renewing = True
        self._to_receiver(at, events.TicketRenewed(attempt=self.transfers[at].attempt + 1))

    def _abort(self, at: int) -> None:
        self._spend("aborts")
        self.is_renewing = False
        self._to_receiver(at, events.Aborted())

    def _quiet(self, at: int) -> None:
        transfer = self.transfers[at]
        transfer.is_cancelling = False
        transfer.posted = set()
        self._to_receiver(at, events.Quiet())

    def _to_receiver(self, at: int, event: events.ReceiveEvent, now: float = _NOW) -> list[events.ReceiveEffect]:
        """Returns the effects that the caller runs: copies."""
        transfer, copies = self.transfers[at], []
        for effect in transfer.receive.handle(event, now):
            match effect:
                case events.StoreMessage():
                    copies.append(effect)
                case events.CancelReceives():
                    transfer.is_cancelling = True
                case events.Verified():
                    self._verified(transfer)
                case events.AnswerCommit(error=error):
                    self._answered(at, is_good=error is None)
                case events.Released():
                    self._released(transfer)
        return copies

    def _verified(self, transfer: _Transfer) -> None:
        if self.owner != transfer.attempt:
            raise Broken(f"attempt {transfer.attempt} is committed, and the blocks are {self.owner!r}")
        if transfer is not self.transfers[-1]:
            raise Broken("a stale attempt is committed")
        right = dict.fromkeys(range(self.bounds.shape.num_messages), b"good")
        if transfer.written != right:
            raise Broken(f"a transfer is committed with {transfer.written}")
        self.owner = "running"

    def _released(self, transfer: _Transfer) -> None:
        if self.owner != transfer.attempt:
            raise Broken(f"attempt {transfer.attempt} frees blocks that are {self.owner!r}")
        if self.is_renewing:
            self.is_renewing = False
            self.transfers.append(_Transfer(transfer.attempt + 1, self.bounds))
            self.owner = transfer.attempt + 1
        else:
            self.owner = "free"
