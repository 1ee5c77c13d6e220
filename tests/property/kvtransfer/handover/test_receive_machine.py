"""Whatever order things happen in, a decode worker's blocks are given away once, and only when they are safe."""

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
from kvtransfer.handover.receive_machine import ReceiveMachine, ReceiveState
from pdserve.base.errors import InvalidTransition, PeerLost, StaleAttempt, StaleError

LEASE_S = 10.0
ATTEMPT = 5
INDEX = st.integers(0, 8)


def digest_of(index: int) -> bytes:
    return bytes([index]) * 16


class DecodeSide(RuleBasedStateMachine):
    """The machine, and a world of receives around it that keeps its own books."""

    @initialize(
        num_bundles=st.integers(0, 3), layer_groups=st.integers(1, 3), corrupt=st.sets(st.integers(0, 8), max_size=1)
    )
    def start(self, num_bundles: int, layer_groups: int, corrupt: set[int]) -> None:
        self.now = 100.0
        self.machine = ReceiveMachine(
            num_bundles=num_bundles, layer_groups=layer_groups, attempt=ATTEMPT, lease_s=LEASE_S, now=self.now
        )
        self.num_messages = num_bundles * layer_groups
        self.corrupt = corrupt
        #: Messages that may still be written to their blocks.
        self.outstanding = set(range(self.num_messages))
        self.arrived: set[int] = set()
        self.lost: set[int] = set()
        self.cancels = 0
        self.verified = 0
        self.released = 0
        self.waiting_commits = 0
        self.last_progress = self.now

    def take(self, event: Event) -> list[Effect]:
        effects = self.machine.handle(event, self.now)
        for effect in effects:
            match effect:
                case Verified():
                    self.verified += 1
                    assert self.arrived == set(range(self.num_messages)), "verified without every message"
                    assert not self.arrived & self.corrupt, "verified wrong bytes"
                case Released():
                    self.released += 1
                    assert not self.outstanding, "released while the transport may write"
                case CancelReceives():
                    self.cancels += 1
                case AnswerCommit(error=error):
                    self.waiting_commits = 0
                    assert (error is None) == bool(self.verified)
        return effects

    @rule(index=INDEX)
    def message_arrives(self, index: int) -> None:
        if index in self.outstanding:
            self.outstanding.remove(index)
            self.arrived.add(index)
            wrong = index in self.corrupt
            self.last_progress = self.now
            self.take(MessageReceived(index=index, digest=bytes(16) if wrong and index else digest_of(index + wrong)))

    @rule(index=INDEX)
    def message_is_lost(self, index: int) -> None:
        if index in self.outstanding:
            self.outstanding.remove(index)
            self.lost.add(index)
            self.take(MessageLost(index=index, error=PeerLost("gone")))

    @rule(index=INDEX)
    def what_is_over_cannot_happen_again(self, index: int) -> None:
        if index in self.arrived | self.lost or index >= self.num_messages:
            before = self.machine.state
            with pytest.raises(InvalidTransition):
                self.take(MessageReceived(index=index, digest=digest_of(index)))
            assert self.machine.state is before

    @rule(honest=st.booleans(), attempt=st.sampled_from([ATTEMPT, ATTEMPT, ATTEMPT, ATTEMPT - 1, ATTEMPT + 1]))
    def commit_comes(self, honest: bool, attempt: int) -> None:
        digests = tuple(digest_of(index) for index in range(self.num_messages)) if honest else (b"?" * 16,)
        before = self.machine.state
        self.waiting_commits += 1
        try:
            self.take(CommitArrived(attempt=attempt, digests=digests))
        except StaleAttempt:
            self.waiting_commits -= 1
            assert attempt != ATTEMPT or before in (ReceiveState.COMMITTING, ReceiveState.COMMITTED)
            assert self.machine.state is before
        else:
            assert attempt == ATTEMPT
            if before is ReceiveState.RECEIVING:
                self.last_progress = self.now

    @rule()
    def abort_comes(self) -> None:
        self.take(Aborted())

    @rule()
    def lease_is_kept(self) -> None:
        self.last_progress = self.now
        self.take(LeaseKept())

    @rule(seconds=st.floats(0.1, 12.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        before = self.cancels
        effects = self.take(TimePassed())
        if self.cancels > before:
            assert self.now - self.last_progress >= LEASE_S, "expired in spite of progress"
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
        with pytest.raises(StaleError):
            self.take(Quiet())

    @invariant()
    def blocks_are_given_away_at_most_once(self) -> None:
        assert self.verified + self.released <= 1
        assert self.cancels <= 1

    @invariant()
    def state_and_books_agree(self) -> None:
        assert (self.machine.state is ReceiveState.COMMITTED) == bool(self.verified)
        assert (self.machine.state is ReceiveState.RELEASED) == bool(self.released)
        assert (self.machine.state is ReceiveState.COMMITTING) == bool(self.waiting_commits)
        assert self.machine.num_received == len(self.arrived)

    def teardown(self) -> None:
        """Time alone ends every transfer: nobody has to come for the blocks to be free."""
        if hasattr(self, "machine") and not self.verified:
            self.now = self.machine.deadline
            self.take(TimePassed())
            if not self.released:
                self.transport_is_quiet()
            assert self.released == 1
            assert not self.waiting_commits


TestDecodeSide = DecodeSide.TestCase
TestDecodeSide.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
