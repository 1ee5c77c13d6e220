"""Whatever order things happen in, a prefill worker's blocks are released once, and never while the wire reads them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtransfer.handover import (
    Aborted,
    AllSent,
    CommitAnswered,
    Disconnect,
    Event,
    LeaseKept,
    Released,
    SendDone,
    SendStarted,
    TimePassed,
)
from kvtransfer.send_machine import SendMachine, SendState
from pdserve.base.errors import DigestMismatch, InvalidTransition, PeerLost, StaleError

LEASE_S = 10.0


class PrefillSide(RuleBasedStateMachine):
    """The machine, and a wire that keeps its own books."""

    @initialize(num_blocks=st.integers(0, 6))
    def start(self, num_blocks: int) -> None:
        self.now = 100.0
        self.machine = SendMachine(num_blocks=num_blocks, lease_s=LEASE_S, now=self.now)
        self.num_blocks = num_blocks
        self.next_index = 0
        self.on_the_wire: set[int] = set()
        self.disconnects = 0
        self.released: list[Released] = []
        self.committed = False

    def take(self, event: Event) -> None:
        for effect in self.machine.handle(event, self.now):
            match effect:
                case Released():
                    assert not self.on_the_wire, "released while the wire reads"
                    self.released.append(effect)
                case Disconnect():
                    self.disconnects += 1

    @rule()
    def a_block_is_pushed(self) -> None:
        if self.machine.state is SendState.SENDING and self.next_index < self.num_blocks:
            self.on_the_wire.add(self.next_index)
            self.take(SendStarted(index=self.next_index))
            self.next_index += 1
        else:
            with pytest.raises(InvalidTransition):
                self.take(SendStarted(index=self.next_index))

    @rule(data=st.data())
    def a_block_got_through(self, data: st.DataObject) -> None:
        if self.on_the_wire:
            index = data.draw(st.sampled_from(sorted(self.on_the_wire)))
            self.on_the_wire.remove(index)
            self.take(SendDone(index=index))

    @rule(data=st.data())
    def a_block_failed(self, data: st.DataObject) -> None:
        if self.on_the_wire:
            index = data.draw(st.sampled_from(sorted(self.on_the_wire)))
            self.on_the_wire.remove(index)
            self.take(SendDone(index=index, error=PeerLost("gone")))
            assert self.machine.state in (SendState.DRAINING, SendState.CLOSED)

    @rule()
    def a_send_cannot_end_twice(self) -> None:
        with pytest.raises(StaleError):
            self.take(SendDone(index=self.num_blocks))

    @rule()
    def all_is_sent(self) -> None:
        if self.machine.state is SendState.SENDING and self.next_index == self.num_blocks:
            self.take(AllSent())
            self.committed = True
        else:
            with pytest.raises(InvalidTransition):
                self.take(AllSent())

    @precondition(lambda self: self.committed)
    @rule(refused=st.booleans())
    def the_commit_is_answered(self, refused: bool) -> None:
        self.take(CommitAnswered(error=DigestMismatch("no") if refused else None))
        assert self.machine.state in (SendState.DRAINING, SendState.CLOSED)

    @rule()
    def abort_comes(self) -> None:
        self.take(Aborted())
        assert self.machine.state in (SendState.DRAINING, SendState.CLOSED)

    @rule()
    def lease_is_kept(self) -> None:
        self.take(LeaseKept())

    @rule(seconds=st.floats(0.1, 12.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.take(TimePassed())
        if self.now >= self.machine.deadline:
            assert self.machine.state in (SendState.DRAINING, SendState.CLOSED)
            assert self.disconnects or not self.on_the_wire

    @invariant()
    def blocks_are_released_once_and_only_when_quiet(self) -> None:
        assert len(self.released) <= 1
        assert self.disconnects <= 1
        assert (self.machine.state is SendState.CLOSED) == bool(self.released)
        assert self.machine.num_outstanding == len(self.on_the_wire)
        assert self.machine.num_unsent == self.num_blocks - self.next_index

    def teardown(self) -> None:
        """The lease's end alone frees the blocks: first the peer is given up, then its sends fail."""
        if hasattr(self, "machine"):
            self.now = max(self.now, self.machine.deadline)
            self.take(TimePassed())
            if not self.released:
                assert self.disconnects == 1
                for index in sorted(self.on_the_wire):
                    self.on_the_wire.remove(index)
                    self.take(SendDone(index=index, error=PeerLost("disconnected")))
            assert len(self.released) == 1


TestPrefillSide = PrefillSide.TestCase
TestPrefillSide.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
