"""The protocol of one transfer at the prefill worker, free of I/O: events in, effects out, time is an argument. Pure.

SENDING -- all sent --> COMMITTING -- answer --> DRAINING -- nothing outstanding --> CLOSED
   '-- abort, send failed, lease over -----------^
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from kvtransfer.handover import transfer_errors
from kvtransfer.handover.events import (
    Aborted,
    AllSent,
    CommitAnswered,
    Disconnect,
    LeaseKept,
    Released,
    SendDone,
    SendEffect,
    SendEvent,
    SendStarted,
    StopSending,
    TimePassed,
    WatchLease,
)
from kvtransfer.handover.layer_groups import TransferShape
from kvtransfer.handover.transfer_machine import TransferMachine
from pdserve.base.errors import PdserveError, PeerLost, TransferTimeout

#: How long an aborted transfer waits for the next of its messages to leave. A decode worker that lives takes them.
ABORTED_S = 5.0


class SendState(Enum):
    """State of a transfer at the prefill worker."""

    SENDING = "sending"
    COMMITTING = "committing"
    DRAINING = "draining"
    CLOSED = "closed"


_S = SendState
_Moves = Mapping[type[SendEvent], frozenset[SendState]]


def _to(*states: SendState) -> frozenset[SendState]:
    return frozenset(states)


def _staying(state: SendState, *events: type[SendEvent]) -> _Moves:
    return dict.fromkeys(events, _to(state))


_END = _to(_S.DRAINING, _S.CLOSED)

#: The states to which each event may lead. An event that is not listed for a state is illegal there.
TRANSITIONS: dict[SendState, _Moves] = {
    _S.SENDING: {
        **_staying(_S.SENDING, LeaseKept),
        SendStarted: _END | {_S.SENDING},
        SendDone: _END | {_S.SENDING},
        AllSent: _END | {_S.COMMITTING},
        Aborted: _END,
        TimePassed: _END | {_S.SENDING},
    },
    _S.COMMITTING: {
        **_staying(_S.COMMITTING, LeaseKept),
        SendDone: _END | {_S.COMMITTING},
        CommitAnswered: _END,
        Aborted: _END,
        TimePassed: _END | {_S.COMMITTING},
    },
    _S.DRAINING: {
        **_staying(_S.DRAINING, CommitAnswered, LeaseKept, Aborted, TimePassed),
        SendDone: _END,
    },
    _S.CLOSED: _staying(_S.CLOSED, CommitAnswered, LeaseKept, Aborted, TimePassed),
}


class SendMachine(TransferMachine[SendState, SendEvent, SendEffect]):
    """One transfer at the prefill worker: its blocks may be read until `Released`.

    A layer group goes through the bundles of its KV group in order, independently of the other layer groups.
    """

    def __init__(self, *, shape: TransferShape, lease_s: float, now: float) -> None:
        super().__init__(SendState.SENDING, TRANSITIONS)
        self.deadline = now + lease_s
        self.num_sent = 0
        self.wire_time = WireTime()
        self._shape = shape
        self._lease_s = lease_s
        #: Messages that were handed to the transport, for each layer group.
        self._num_started = [0] * shape.num_layer_groups
        #: The messages of each layer group.
        self._indices = [shape.indices_of(layer_group) for layer_group in range(shape.num_layer_groups)]
        self._outstanding: set[int] = set()
        self._error: PdserveError | None = None
        self._disconnected = False
        #: End of the lease when the transfer was aborted; None: it was not.
        self._aborted_until: float | None = None

    @property
    def num_outstanding(self) -> int:
        """Messages that the transport is reading."""
        return len(self._outstanding)

    @property
    def num_unsent(self) -> int:
        """Messages that were not handed to the transport yet."""
        return self._shape.num_messages - sum(self._num_started)

    def next_index(self, group: int) -> int | None:
        """The message of a layer group that is sent next; None: all are sent."""
        num_started, indices = self._num_started[group], self._indices[group]
        return indices[num_started] if num_started < len(indices) else None

    def _dispatch(self, event: SendEvent, now: float) -> list[SendEffect]:
        match event:
            case SendStarted():
                return self._on_started(event, now)
            case SendDone():
                return self._on_done(event, now)
            case AllSent():
                return self._on_all_sent(now)
            case CommitAnswered():
                return self._on_answer(event)
            case LeaseKept():
                return self._on_lease_kept(now)
            case Aborted():
                return self._on_aborted(now)
            case TimePassed():
                return self._on_time(now)

    def _on_started(self, event: SendStarted, now: float) -> list[SendEffect]:
        if now >= self.deadline:
            return self._expire()
        group = self._shape.layer_group_of(event.index)
        expected = self.next_index(group)
        indices = self._shape.run(event.index, event.count)
        if event.index != expected or len(indices) < event.count:
            raise transfer_errors.out_of_order(event.index, expected, self._shape)
        self._num_started[group] += event.count
        self._outstanding.update(indices)
        self.wire_time.started(now, len(indices))
        return []

    def _on_done(self, event: SendDone, now: float) -> list[SendEffect]:
        indices = self._shape.run(event.index, event.count)
        if len(indices) < event.count or not self._outstanding.issuperset(indices):
            raise transfer_errors.not_outstanding(event.index, self._shape)
        self._outstanding.difference_update(indices)
        self.wire_time.done(now, event.count)
        if event.error is None:
            self.num_sent += event.count
        if self.state is SendState.DRAINING:
            self._watch_aborted(now)
            return self._try_release()
        if event.error is not None:
            return self._drain(event.error)
        self._renew_lease(now)
        return []

    def _on_all_sent(self, now: float) -> list[SendEffect]:
        if now >= self.deadline:
            return self._expire()
        if self.num_unsent:
            raise transfer_errors.not_all_sent(self.num_unsent, self._shape)
        self._renew_lease(now)
        self.state = SendState.COMMITTING
        return []

    def _on_answer(self, event: CommitAnswered) -> list[SendEffect]:
        return self._drain(event.error) if self.state is SendState.COMMITTING else []

    def _on_lease_kept(self, now: float) -> list[SendEffect]:
        if self.state in (SendState.SENDING, SendState.COMMITTING):
            self._renew_lease(now)
        return []

    def _on_aborted(self, now: float) -> list[SendEffect]:
        if self.state not in (SendState.SENDING, SendState.COMMITTING):
            return []
        self._aborted_until = self.deadline
        self._watch_aborted(now)
        effects = self._drain(None)
        # Its timer may come late: then the time is over already.
        return [*effects, *self._on_time(now)] if self._outstanding else effects

    def _watch_aborted(self, now: float) -> None:
        """Nobody waits for an aborted transfer, and a newer attempt of the request may wait for its end."""
        if self._aborted_until is not None:
            self.deadline = min(self._aborted_until, now + ABORTED_S)

    def _on_time(self, now: float) -> list[SendEffect]:
        if self.state is SendState.CLOSED or self._disconnected:
            return []
        if now < self.deadline:
            return [WatchLease(until=self.deadline)]
        if self.state is not SendState.DRAINING:
            return self._expire()
        self._disconnected = True
        self._error = self._error or transfer_errors.sends_stuck(self._lease_s)
        return [Disconnect()]

    def _expire(self) -> list[SendEffect]:
        if self.state is SendState.COMMITTING and not self._outstanding:
            return self._drain(transfer_errors.commit_unanswered(self._lease_s))
        return self._drain(transfer_errors.lease_over(self._lease_s, self.num_sent, self._shape))

    def _drain(self, error: PdserveError | None) -> list[SendEffect]:
        self.state = SendState.DRAINING
        self._error = error
        stop = StopSending(error=error or transfer_errors.transfer_over())
        # A decode worker that lives takes even what it no longer wants. One that made no progress for a whole lease,
        # or is lost, will not.
        if isinstance(error, TransferTimeout | PeerLost) and self._outstanding:
            self._disconnected = True
            return [stop, Disconnect()]
        return [stop, *self._try_release()]

    def _try_release(self) -> list[SendEffect]:
        if self._outstanding:
            return []
        self.state = SendState.CLOSED
        return [Released(error=self._error)]

    def _renew_lease(self, now: float) -> None:
        self.deadline = max(self.deadline, now + self._lease_s)


class WireTime:
    """The union of the intervals in which at least one message was on its way. Times in seconds."""

    __slots__ = ("_busy_s", "_num_outstanding", "_since", "first_started_at", "last_done_at")

    def __init__(self) -> None:
        self.first_started_at: float | None = None
        self.last_done_at: float | None = None
        self._num_outstanding = 0
        self._since = 0.0
        self._busy_s = 0.0

    def started(self, now: float, count: int = 1) -> None:
        """Messages were handed to the transport."""
        if self.first_started_at is None:
            self.first_started_at = now
        if self._num_outstanding == 0:
            self._since = now
        self._num_outstanding += count

    def done(self, now: float, count: int = 1) -> None:
        """The transport is done with messages."""
        self.last_done_at = now
        self._num_outstanding -= count
        if self._num_outstanding == 0:
            self._busy_s += now - self._since

    def busy_s(self, now: float) -> float:
        """Seconds until now."""
        return self._busy_s + (now - self._since if self._num_outstanding else 0.0)
