"""In whatever order things happen, a decode worker's blocks are given away once, and only when they are safe."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtransfer.handover.events import (
    Aborted,
    AnswerCommit,
    CancelReceives,
    CommitArrived,
    ForgetAt,
    LeaseKept,
    MessageLanded,
    MessageLost,
    MessagesReceived,
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
from kvtransfer.handover.layer_groups import TransferShape
from kvtransfer.handover.receive_machine import TRANSITIONS, ReceiveMachine, ReceiveState
from pdserve.base.errors import InvalidTransition, PeerLost, StaleAttempt, StaleError
from pdserve.base.ids import RequestId

LEASE_S = 10.0
ATTEMPT = 5
REQUEST = RequestId("r")
INDEX = st.integers(0, 8)
#: Bundles and layer groups of each KV group: of one, or of a full and a windowed one.
SEGMENTS = st.tuples(st.tuples(st.integers(0, 3), st.integers(1, 3))) | st.tuples(
    *[st.tuples(st.sampled_from([0, 1, 2, 2]), st.integers(1, 2))] * 2
)
HELD = (ReceiveState.RECEIVING, ReceiveState.COMMITTING, ReceiveState.BROKEN)


def digest_of(index: int) -> bytes:
    return bytes([index]) * 16


class DecodeSide(RuleBasedStateMachine):
    """The machine, and a world of receives around it with a record of its own."""

    @initialize(segments=SEGMENTS, corrupt=st.sets(st.integers(0, 8), max_size=1))
    def start(self, segments: tuple[tuple[int, int], ...], corrupt: set[int]) -> None:
        self.now = 100.0
        self.shape = TransferShape.of(
            num_blocks=[count for count, _ in segments],
            bundle_blocks=1,
            layer_groups=[groups for _, groups in segments],
        )
        self.machine = ReceiveMachine(
            shape=self.shape, request_id=REQUEST, attempt=ATTEMPT, lease_s=LEASE_S, now=self.now
        )
        self.num_messages = sum(num_bundles * layer_groups for num_bundles, layer_groups in segments)
        self.corrupt = corrupt
        #: Messages that may still be written to their blocks, and those among them that are being copied there.
        self.outstanding = set(range(self.num_messages))
        self.storing: set[int] = set()
        self.arrived: set[int] = set()
        self.lost: set[int] = set()
        self.landed_at: list[float] = []
        self.first_commit: CommitArrived | None = None
        self.disowned = False
        self.cancels = 0
        self.verified = 0
        self.released = 0
        self.waiting_commits = 0
        self.last_progress = self.now
        #: Time of the one timer, as the effects set it.
        self.timer: float | None = None
        self.take(TimePassed())

    def take(self, event: ReceiveEvent) -> list[ReceiveEffect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            match effect:
                case Verified(first_tokens=first_tokens, receive_s=receive_s):
                    self.verified += 1
                    assert self.arrived == set(range(self.num_messages)), "verified without every message"
                    assert not self.arrived & self.corrupt, "verified wrong bytes"
                    assert self.first_commit is not None
                    assert first_tokens == self.first_commit.first_tokens
                    assert receive_s == (self.landed_at[-1] - self.landed_at[0] if self.landed_at else 0.0)
                case Released(error=error):
                    self.released += 1
                    assert not self.outstanding, "released while the transport may write"
                    assert (error is None) == self.disowned, "the request learns the reason unless it let go"
                case CancelReceives():
                    self.cancels += 1
                case AnswerCommit(error=error):
                    self.waiting_commits = 0
                    assert (error is None) == bool(self.verified)
                case StoreMessage(index=index):
                    assert index in self.outstanding
                    assert not self.cancels, "nothing is stored for a transfer that ends"
                    self.storing.add(index)
                case WatchLease(until=until):
                    self.timer = until
                    assert until > self.now
                case ForgetAt(at=at):
                    assert self.verified
                    assert at == self.now + LEASE_S
        return effects

    @rule(index=INDEX, count=st.integers(1, 3))
    def messages_arrive(self, index: int, count: int) -> None:
        """Straight in its blocks, or after the copy that followed its landing."""
        if not self.outstanding:
            return
        index = sorted(self.outstanding)[index % len(self.outstanding)]
        pool = self.storing if index in self.storing else self.outstanding - self.storing
        while not pool.issuperset(run := self.shape.run(index, count)) or len(run) < count:
            count -= 1
        self.outstanding.difference_update(run)
        self.arrived.update(run)
        if index in self.storing:
            self.storing.difference_update(run)
        else:
            self.landed_at.append(self.now)
        self.last_progress = self.now
        self.take(MessagesReceived(index=index, digests=tuple(map(self.arriving_digest, run))))

    def arriving_digest(self, index: int) -> bytes:
        wrong = index in self.corrupt
        return bytes(16) if wrong and index else digest_of(index + wrong)

    @rule(index=INDEX)
    def message_lands(self, index: int) -> None:
        if index in self.outstanding - self.storing:
            before = len(self.storing)
            self.take(MessageLanded(index=index))
            if len(self.storing) > before:
                self.landed_at.append(self.now)
            assert (len(self.storing) > before) == (self.machine.state in HELD)

    @rule(index=INDEX)
    def message_is_lost(self, index: int) -> None:
        if index in self.outstanding:
            self.outstanding.remove(index)
            self.storing.discard(index)
            self.lost.add(index)
            self.take(MessageLost(index=index, error=PeerLost("gone")))

    @rule(index=INDEX, count=st.integers(2, 4))
    def a_run_ends_whole_or_not_at_all(self, index: int, count: int) -> None:
        run = self.shape.run(index, count)
        if len(run) < count or not (self.arrived | self.lost).isdisjoint(run):
            num_received = self.machine.num_received
            with pytest.raises(InvalidTransition):
                self.take(MessagesReceived(index=index, digests=(digest_of(index),) * count))
            assert self.machine.num_received == num_received

    @rule(index=INDEX)
    def a_message_cannot_end_twice(self, index: int) -> None:
        if index in self.arrived | self.lost or index >= self.num_messages:
            before = self.machine.state
            with pytest.raises(InvalidTransition):
                self.take(MessagesReceived(index=index, digests=(digest_of(index),)))
            assert self.machine.state is before

    @rule(
        honest=st.booleans(),
        attempt=st.sampled_from([ATTEMPT, ATTEMPT, ATTEMPT, ATTEMPT - 1, ATTEMPT + 1]),
        first_token=st.sampled_from([1, 1, 1, 2]),
        request=st.sampled_from([REQUEST, REQUEST, REQUEST, RequestId("other")]),
    )
    def commit_comes(self, honest: bool, attempt: int, first_token: int, request: RequestId) -> None:
        digests = tuple(digest_of(index) for index in range(self.num_messages)) if honest else (b"?" * 16,)
        commit = CommitArrived(request_id=request, attempt=attempt, digests=digests, first_tokens=(first_token,))
        before = self.machine.state
        is_ours = attempt == ATTEMPT and request == REQUEST
        if not is_ours or self.first_commit not in (None, commit):
            with pytest.raises(StaleError):
                self.take(commit)
            assert self.machine.state is before
            return
        self.first_commit = commit
        self.waiting_commits += 1
        if before is ReceiveState.RECEIVING:
            self.last_progress = self.now
        self.take(commit)

    @rule()
    def abort_comes(self) -> None:
        self.disowned = self.disowned or not self.released
        self.take(Aborted())

    @rule(attempt=st.sampled_from([ATTEMPT - 1, ATTEMPT, ATTEMPT + 1, ATTEMPT + 1]))
    def ticket_is_renewed(self, attempt: int) -> None:
        before = self.machine.state
        if before in HELD and attempt > ATTEMPT:
            self.disowned = True
            self.take(TicketRenewed(attempt=attempt))
            assert self.cancels == 1
        else:
            with pytest.raises(StaleAttempt if before in HELD else StaleError):
                self.take(TicketRenewed(attempt=attempt))
            assert self.machine.state is before

    @rule()
    def lease_is_kept(self) -> None:
        self.last_progress = self.now
        self.take(LeaseKept())

    @rule(seconds=st.floats(0.1, 12.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.timer is None or self.now < self.timer:
            return
        self.timer = None
        before = self.cancels
        effects = self.take(TimePassed())
        if self.cancels > before:
            assert self.now >= self.last_progress + LEASE_S, "expired in spite of progress"
            assert any(isinstance(effect, CancelReceives) for effect in effects)

    @precondition(lambda self: self.cancels and not self.released)
    @rule()
    def transport_is_quiet(self) -> None:
        self.outstanding.clear()
        self.take(Quiet())
        assert self.released == 1

    @precondition(lambda self: not self.cancels)
    @rule()
    def quiet_without_a_cancel_is_illegal(self) -> None:
        with pytest.raises(InvalidTransition, match="Its way so far: receiving"):
            self.take(Quiet())

    @invariant()
    def blocks_are_given_away_at_most_once(self) -> None:
        assert self.verified + self.released <= 1
        assert self.cancels <= 1

    @invariant()
    def a_transfer_that_holds_blocks_is_watched(self) -> None:
        assert self.timer is not None or self.machine.state not in HELD

    @invariant()
    def state_and_record_agree(self) -> None:
        assert (self.machine.state is ReceiveState.COMMITTED) == bool(self.verified)
        assert (self.machine.state is ReceiveState.RELEASED) == bool(self.released)
        assert (self.machine.state is ReceiveState.COMMITTING) == bool(self.waiting_commits)
        assert self.machine.num_received == len(self.arrived)

    def teardown(self) -> None:
        """The passing of time alone frees the blocks, unless they were verified."""
        if hasattr(self, "machine") and not self.verified:
            while self.timer is not None:
                self.time_passes(max(0.1, self.timer - self.now))
            if not self.released:
                self.transport_is_quiet()
            assert self.released == 1
            assert not self.waiting_commits


TestDecodeSide = DecodeSide.TestCase
TestDecodeSide.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_every_state_has_a_row_and_the_two_last_ones_are_final() -> None:
    assert TRANSITIONS.keys() == set(ReceiveState)
    for final in (ReceiveState.COMMITTED, ReceiveState.RELEASED):
        assert set().union(*TRANSITIONS[final].values()) == {final}


def test_an_illegal_event_is_refused_with_the_transfers_history() -> None:
    shape = TransferShape.of(num_blocks=[1], bundle_blocks=1, layer_groups=[1])
    machine = ReceiveMachine(shape=shape, request_id=REQUEST, attempt=1, lease_s=LEASE_S, now=0.0)
    machine.handle(MessageLost(index=0, error=PeerLost("gone")), 1.0)
    machine.handle(Aborted(), 2.0)
    machine.handle(Quiet(), 3.0)
    with pytest.raises(
        InvalidTransition, match="receiving -> broken on MessageLost -> cancelling on Aborted -> released"
    ):
        machine.handle(Quiet(), 4.0)
