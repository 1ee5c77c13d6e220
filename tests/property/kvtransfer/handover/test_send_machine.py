"""Whatever order things happen in, a prefill worker's blocks are released once, and never while the wire reads them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtransfer.handover.events import (
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
from kvtransfer.handover.send_machine import SendMachine, SendState
from pdserve.base.errors import DigestMismatch, InvalidTransition, PeerLost, StaleError

LEASE_S = 10.0


class PrefillSide(RuleBasedStateMachine):
    """The machine, and a wire that keeps its own books."""

    @initialize(num_bundles=st.integers(0, 4), layer_groups=st.integers(1, 3))
    def start(self, num_bundles: int, layer_groups: int) -> None:
        self.now = 100.0
        self.machine = SendMachine(num_bundles=num_bundles, layer_groups=layer_groups, lease_s=LEASE_S, now=self.now)
        self.num_bundles = num_bundles
        #: Of each group of layers.
        self.next_block = [0] * layer_groups
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

    @property
    def num_unsent(self) -> int:
        return self.num_bundles * len(self.next_block) - sum(self.next_block)

    @rule(data=st.data())
    def a_group_of_a_block_is_pushed(self, data: st.DataObject) -> None:
        group = data.draw(st.integers(0, len(self.next_block) - 1))
        index = self.next_block[group] * len(self.next_block) + group
        if self.machine.state is SendState.SENDING and self.next_block[group] < self.num_bundles:
            self.on_the_wire.add(index)
            self.take(SendStarted(index=index))
            self.next_block[group] += 1
        else:
            with pytest.raises(InvalidTransition):
                self.take(SendStarted(index=index))

    @rule(data=st.data())
    def a_group_goes_through_the_blocks_in_their_order_and_once(self, data: st.DataObject) -> None:
        count = len(self.next_block)
        group = data.draw(st.integers(0, count - 1))
        block = data.draw(st.integers(0, self.num_bundles + 1).filter(lambda block: block != self.next_block[group]))
        with pytest.raises(InvalidTransition):
            self.take(SendStarted(index=block * count + group))

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
            self.take(SendDone(index=self.num_bundles * len(self.next_block)))

    @rule()
    def all_is_sent(self) -> None:
        if self.machine.state is SendState.SENDING and not self.num_unsent:
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
        assert self.machine.num_unsent == self.num_unsent

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
