"""In whatever order things happen, a prefill worker's blocks are released once, and never while the wire reads them."""

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
    LeaseKept,
    Released,
    SendDone,
    SendEvent,
    SendStarted,
    StopSending,
    TimePassed,
    WatchLease,
)
from kvtransfer.handover.layer_groups import TransferShape
from kvtransfer.handover.send_machine import TRANSITIONS, SendMachine, SendState
from pdserve.base.errors import DigestMismatch, InvalidTransition, PeerLost, StaleError, TransferTimeout

LEASE_S = 10.0
#: Bundles and layer groups of each KV group: of one, or of a full and a windowed one.
SEGMENTS = st.tuples(st.tuples(st.integers(0, 4), st.integers(1, 3))) | st.tuples(
    *[st.tuples(st.sampled_from([0, 1, 2, 2]), st.integers(1, 2))] * 2
)
OVER = (SendState.DRAINING, SendState.CLOSED)


class PrefillSide(RuleBasedStateMachine):
    """The machine, and a wire with a record of its own."""

    @initialize(segments=SEGMENTS)
    def start(self, segments: tuple[tuple[int, int], ...]) -> None:
        self.now = 100.0
        shape = TransferShape.of(
            num_blocks=[count for count, _ in segments],
            bundle_blocks=1,
            layer_groups=[groups for _, groups in segments],
        )
        self.machine = SendMachine(shape=shape, lease_s=LEASE_S, now=self.now)
        #: Messages of each layer group, in the order in which they have to go.
        self.unsent: list[list[int]] = []
        self.num_messages = 0
        for num_bundles, layer_groups in segments:
            own = range(self.num_messages, self.num_messages + num_bundles * layer_groups)
            self.unsent += [[*own[group::layer_groups]] for group in range(layer_groups)]
            self.num_messages += len(own)
        self.on_the_wire: set[int] = set()
        self.disconnects = 0
        self.released: list[Released] = []
        self.stopped: list[StopSending] = []
        self.committed = False
        self.last_progress = self.now
        #: Seconds in which something was on the wire.
        self.busy_s = 0.0
        #: Time of the one timer, as the effects set it.
        self.timer: float | None = None
        self.take(TimePassed())

    def take(self, event: SendEvent) -> None:
        for effect in self.machine.handle(event, self.now):
            match effect:
                case Released():
                    assert not self.on_the_wire, "released while the wire reads"
                    assert self.stopped, "released while more may be sent"
                    self.released.append(effect)
                case Disconnect():
                    self.disconnects += 1
                case StopSending(error=error):
                    self.stopped.append(effect)
                    assert not isinstance(error, TransferTimeout) or self.now >= self.last_progress + LEASE_S
                case WatchLease(until=until):
                    assert until > self.now
                    self.timer = until

    @property
    def num_unsent(self) -> int:
        return sum(map(len, self.unsent))

    @property
    def lease_is_over(self) -> bool:
        return self.now >= self.last_progress + LEASE_S

    @rule(data=st.data())
    def a_group_of_a_block_is_pushed(self, data: st.DataObject) -> None:
        group = data.draw(st.integers(0, len(self.unsent) - 1))
        index = next(iter(self.unsent[group]), None)
        assert self.machine.next_index(group) == index
        index = self.num_messages if index is None else index
        run = self.unsent[group][: data.draw(st.integers(1, 3))]
        started = SendStarted(index=index, count=len(run or [index]))
        if self.machine.state is SendState.SENDING and self.lease_is_over:
            self.take(started)
            assert isinstance(self.stopped[0].error, TransferTimeout)
        elif self.machine.state is SendState.SENDING and self.unsent[group]:
            self.on_the_wire.update(run)
            self.take(started)
            del self.unsent[group][: len(run)]
        else:
            with pytest.raises(InvalidTransition):
                self.take(started)

    @precondition(lambda self: self.machine.state is SendState.SENDING and not self.lease_is_over)
    @rule()
    def the_rest_is_pushed(self) -> None:
        for indices in self.unsent:
            for index in indices:
                self.on_the_wire.add(index)
                self.take(SendStarted(index=index))
            indices.clear()

    @precondition(lambda self: not self.lease_is_over)
    @rule(data=st.data())
    def a_group_goes_through_the_blocks_in_their_order_and_once(self, data: st.DataObject) -> None:
        following = {indices[0] for indices in self.unsent if indices}
        index = data.draw(st.integers(0, self.num_messages + 3).filter(lambda index: index not in following))
        with pytest.raises(InvalidTransition):
            self.take(SendStarted(index=index))

    def some_of_the_wire(self, data: st.DataObject) -> tuple[int, range]:
        """Takes a message off the wire, and those behind it in its layer group that are there, too."""
        index = data.draw(st.sampled_from(sorted(self.on_the_wire)))
        count = data.draw(st.integers(1, 3))
        while not self.on_the_wire.issuperset(run := self.machine._shape.run(index, count)) or len(run) < count:
            count -= 1
        self.on_the_wire.difference_update(run)
        return index, run

    @rule(data=st.data())
    def a_run_does_not_go_beyond_its_layer_group(self, data: st.DataObject) -> None:
        group = data.draw(st.integers(0, len(self.unsent) - 1))
        unsent = self.unsent[group]
        if unsent and self.machine.state is SendState.SENDING and not self.lease_is_over:
            with pytest.raises(InvalidTransition):
                self.take(SendStarted(index=unsent[0], count=len(unsent) + 1))

    @rule(data=st.data())
    def a_block_got_through(self, data: st.DataObject) -> None:
        if self.on_the_wire:
            index, run = self.some_of_the_wire(data)
            if not self.stopped:
                self.last_progress = self.now
            self.take(SendDone(index=index, count=len(run)))

    @rule(data=st.data())
    def a_block_failed(self, data: st.DataObject) -> None:
        if self.on_the_wire:
            index, run = self.some_of_the_wire(data)
            self.take(SendDone(index=index, count=len(run), error=PeerLost("gone")))
            assert self.machine.state in OVER

    @rule()
    def a_send_cannot_end_twice(self) -> None:
        with pytest.raises(StaleError):
            self.take(SendDone(index=self.num_messages))

    @rule()
    def all_is_sent(self) -> None:
        if self.machine.state is SendState.SENDING and (self.lease_is_over or not self.num_unsent):
            was_over = self.lease_is_over
            if not was_over:
                self.last_progress = self.now
            self.take(AllSent())
            assert was_over == bool(self.stopped)
            if not was_over:
                self.committed = True
        else:
            with pytest.raises(InvalidTransition):
                self.take(AllSent())

    @precondition(lambda self: self.committed)
    @rule(refused=st.booleans())
    def the_commit_is_answered(self, refused: bool) -> None:
        self.take(CommitAnswered(error=DigestMismatch("no") if refused else None))
        assert self.machine.state in OVER

    @rule()
    def abort_comes(self) -> None:
        self.take(Aborted())
        assert self.machine.state in OVER

    @rule()
    def lease_is_kept(self) -> None:
        if not self.stopped:
            self.last_progress = self.now
        self.take(LeaseKept())

    @rule(seconds=st.floats(0.1, 12.0), is_late=st.booleans())
    def time_passes(self, seconds: float, is_late: bool) -> None:
        """The timer may fire late: what happens in between finds the lease over."""
        self.now += seconds
        if self.on_the_wire:
            self.busy_s += seconds
        if is_late or self.timer is None or self.now < self.timer:
            return
        self.timer = None
        self.take(TimePassed())
        if self.lease_is_over:
            assert self.machine.state in OVER
            assert self.disconnects or not self.on_the_wire

    @invariant()
    def blocks_are_released_once_and_only_when_quiet(self) -> None:
        assert len(self.released) <= 1
        assert len(self.stopped) <= 1
        assert self.disconnects <= 1
        assert (self.machine.state is SendState.CLOSED) == bool(self.released)
        assert (self.machine.state in OVER) == bool(self.stopped)
        assert self.machine.num_outstanding == len(self.on_the_wire)
        assert self.machine.num_unsent == self.num_unsent

    @invariant()
    def a_transfer_on_the_wire_is_watched_until_its_peer_is_disconnected(self) -> None:
        assert self.timer is not None or not self.on_the_wire or self.disconnects

    @invariant()
    def the_time_on_the_wire_is_counted_once(self) -> None:
        assert self.machine.wire_time.busy_s(self.now) == pytest.approx(self.busy_s)

    def teardown(self) -> None:
        """The lease's end alone frees the blocks: first the peer is given up, then its sends fail."""
        if hasattr(self, "machine"):
            while self.timer is not None:
                self.time_passes(max(0.1, self.timer - self.now), is_late=False)
            if not self.released:
                assert self.disconnects == 1
                for index in sorted(self.on_the_wire):
                    self.on_the_wire.remove(index)
                    self.take(SendDone(index=index, error=PeerLost("disconnected")))
            assert len(self.released) == 1


TestPrefillSide = PrefillSide.TestCase
TestPrefillSide.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_every_state_has_a_row_and_the_last_one_is_final() -> None:
    assert TRANSITIONS.keys() == set(SendState)
    assert set().union(*TRANSITIONS[SendState.CLOSED].values()) == {SendState.CLOSED}


def test_an_illegal_event_is_refused_with_the_transfers_history() -> None:
    machine = SendMachine(
        shape=TransferShape.of(num_blocks=[0], bundle_blocks=1, layer_groups=[1]), lease_s=LEASE_S, now=0.0
    )
    machine.handle(AllSent(), 1.0)
    machine.handle(CommitAnswered(), 2.0)
    with pytest.raises(InvalidTransition, match="sending -> committing on AllSent -> closed on CommitAnswered"):
        machine.handle(AllSent(), 3.0)
