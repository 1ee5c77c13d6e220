"""The protocol of one transfer at the decode worker, free of I/O: events in, effects out, time is an argument. Pure.

RECEIVING -- commit --> COMMITTING -- all here, digests equal --> COMMITTED
    |                       |
    | message lost          | message lost, digests differ
    '--------> BROKEN <-----'         No commit can succeed; the blocks wait for a new ticket.

RECEIVING, COMMITTING or BROKEN -- abort, renewal, lease over --> CANCELLING -- quiet --> RELEASED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from kvtransfer.handover import transfer_errors
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
from kvtransfer.handover.transfer_machine import TransferMachine
from pdserve.base.errors import PdserveError, TransferError
from pdserve.base.ids import RequestId


class ReceiveState(Enum):
    """State of a transfer at the decode worker."""

    RECEIVING = "receiving"
    COMMITTING = "committing"
    BROKEN = "broken"
    CANCELLING = "cancelling"
    COMMITTED = "committed"
    RELEASED = "released"


_S = ReceiveState
_Moves = Mapping[type[ReceiveEvent], frozenset[ReceiveState]]


def _to(*states: ReceiveState) -> frozenset[ReceiveState]:
    return frozenset(states)


def _staying(state: ReceiveState, *events: type[ReceiveEvent]) -> _Moves:
    return dict.fromkeys(events, _to(state))


_ENDINGS: _Moves = {Aborted: _to(_S.CANCELLING), TicketRenewed: _to(_S.CANCELLING)}

#: The states to which each event may lead. An event that is not listed for a state is illegal there.
TRANSITIONS: dict[ReceiveState, _Moves] = {
    _S.RECEIVING: {
        **_staying(_S.RECEIVING, MessageLanded, MessagesReceived, LeaseKept),
        MessageLost: _to(_S.BROKEN),
        CommitArrived: _to(_S.COMMITTING, _S.COMMITTED, _S.BROKEN),
        TimePassed: _to(_S.RECEIVING, _S.CANCELLING),
        **_ENDINGS,
    },
    _S.COMMITTING: {
        **_staying(_S.COMMITTING, MessageLanded, CommitArrived, LeaseKept),
        MessagesReceived: _to(_S.COMMITTING, _S.COMMITTED, _S.BROKEN),
        MessageLost: _to(_S.BROKEN),
        TimePassed: _to(_S.COMMITTING, _S.CANCELLING),
        **_ENDINGS,
    },
    _S.BROKEN: {
        **_staying(_S.BROKEN, MessageLanded, MessagesReceived, MessageLost, CommitArrived, LeaseKept),
        TimePassed: _to(_S.BROKEN, _S.CANCELLING),
        **_ENDINGS,
    },
    _S.CANCELLING: {
        **_staying(_S.CANCELLING, MessageLanded, MessagesReceived, MessageLost, CommitArrived),
        **_staying(_S.CANCELLING, LeaseKept, Aborted, TicketRenewed, TimePassed),
        Quiet: _to(_S.RELEASED),
    },
    _S.COMMITTED: _staying(_S.COMMITTED, CommitArrived, LeaseKept, Aborted, TicketRenewed, TimePassed),
    _S.RELEASED: {
        **_staying(_S.RELEASED, MessageLanded, MessagesReceived, MessageLost, CommitArrived),
        **_staying(_S.RELEASED, LeaseKept, Aborted, TicketRenewed, TimePassed),
    },
}
#: States in which the transfer holds the lease. In the others its end changes nothing.
_LEASED = _to(_S.RECEIVING, _S.COMMITTING, _S.BROKEN)


class ReceiveMachine(TransferMachine[ReceiveState, ReceiveEvent, ReceiveEffect]):
    """One transfer at the decode worker. Every sign of progress renews the lease.

    `handle` raises StaleError or StaleAttempt for a commit or a renewal that comes too late or is not for this ticket.
    """

    def __init__(
        self, *, shape: TransferShape, request_id: RequestId, attempt: int, lease_s: float, now: float
    ) -> None:
        super().__init__(ReceiveState.RECEIVING, TRANSITIONS)
        self.num_received = 0
        self.deadline = now + lease_s
        self._shape = shape
        self._request_id = request_id
        self._attempt = attempt
        self._lease_s = lease_s
        #: Digests of received messages.
        self._digests: list[bytes | None] = [None] * shape.num_messages
        self._storing: set[int] = set()
        self._lost: set[int] = set()
        self._first_landed_at: float | None = None
        self._last_landed_at = now
        #: The first commit, whose repetition gets the same answer.
        self._commit: CommitArrived | None = None
        #: The request let the transfer go, and need not learn how it ended.
        self._disowned = False
        self._error: PdserveError | None = None

    @property
    def num_outstanding(self) -> int:
        """Messages that were neither received nor lost."""
        return len(self._digests) - self.num_received - len(self._lost)

    def _dispatch(self, event: ReceiveEvent, now: float) -> list[ReceiveEffect]:
        match event:
            case MessagesReceived():
                return self._on_received(event, now)
            case MessageLanded():
                return self._on_landed(event, now)
            case MessageLost():
                return self._on_lost(event)
            case CommitArrived():
                return self._on_commit(event, now)
            case LeaseKept():
                return self._on_lease_kept(now)
            case TimePassed():
                return self._on_time(now)
            case TicketRenewed():
                return self._on_renewed(event)
            case Aborted():
                return self._on_aborted()
            case Quiet():
                return self._on_quiet()

    def _on_landed(self, event: MessageLanded, now: float) -> list[ReceiveEffect]:
        self._require_outstanding(event.index)
        if self.state not in _LEASED:
            return []
        self._storing.add(event.index)
        self._note_arrival(now)
        return [StoreMessage(index=event.index)]

    def _on_received(self, event: MessagesReceived, now: float) -> list[ReceiveEffect]:
        indices = self._shape.run(event.index, len(event.digests))
        if len(indices) < len(event.digests):
            raise transfer_errors.not_outstanding(event.index, self._shape)
        for index in indices:
            self._require_outstanding(index)
        if self.state is ReceiveState.RELEASED:
            return []
        if not self._storing.issuperset(indices):
            self._note_arrival(now)
        self._storing.difference_update(indices)
        for index, digest in zip(indices, event.digests, strict=True):
            self._digests[index] = digest
        self.num_received += len(indices)
        if self.state in _LEASED:
            self._renew_lease(now)
        return self._try_commit(now) if self.state is ReceiveState.COMMITTING else []

    def _on_lost(self, event: MessageLost) -> list[ReceiveEffect]:
        self._require_outstanding(event.index)
        self._storing.discard(event.index)
        self._lost.add(event.index)
        return self._break(event.error) if self.state in _LEASED else []

    def _on_commit(self, commit: CommitArrived, now: float) -> list[ReceiveEffect]:
        if commit.request_id != self._request_id:
            raise transfer_errors.other_request(self._request_id)
        if commit.attempt != self._attempt:
            raise transfer_errors.other_attempt(commit.attempt, self._attempt)
        if self._commit is not None and commit != self._commit:
            raise transfer_errors.other_commit()
        self._commit = commit
        if self.state is ReceiveState.COMMITTING:
            return []
        if self.state is ReceiveState.COMMITTED:
            return [AnswerCommit()]
        if self.state is not ReceiveState.RECEIVING:
            return [AnswerCommit(error=self._error or transfer_errors.given_up())]
        self.state = ReceiveState.COMMITTING
        self._renew_lease(now)
        if len(commit.digests) != self._shape.num_messages:
            return self._break(transfer_errors.digests_miscounted(len(commit.digests), self._shape))
        return self._try_commit(now)

    def _on_lease_kept(self, now: float) -> list[ReceiveEffect]:
        if self.state in _LEASED:
            self._renew_lease(now)
        return []

    def _on_time(self, now: float) -> list[ReceiveEffect]:
        if self.state not in _LEASED:
            return []
        if now < self.deadline:
            return [WatchLease(until=self.deadline)]
        return self._cancel(transfer_errors.lease_over(self._lease_s, self.num_received, self._shape))

    def _on_renewed(self, event: TicketRenewed) -> list[ReceiveEffect]:
        if self.state not in _LEASED:
            raise transfer_errors.reservation_over()
        if event.attempt <= self._attempt:
            raise transfer_errors.attempt_not_newer(event.attempt, self._attempt)
        return self._on_aborted()

    def _on_aborted(self) -> list[ReceiveEffect]:
        self._disowned = True
        return self._cancel(None) if self.state in _LEASED else []

    def _on_quiet(self) -> list[ReceiveEffect]:
        self.state = ReceiveState.RELEASED
        return [Released(error=None if self._disowned else self._error)]

    def _try_commit(self, now: float) -> list[ReceiveEffect]:
        if self.num_outstanding:
            return []
        commit = self._commit
        assert commit is not None
        wrong = [index for index, digest in enumerate(self._digests) if digest != commit.digests[index]]
        if wrong:
            return self._break(transfer_errors.digests_differ(wrong, self._shape))
        self.state = ReceiveState.COMMITTED
        first = self._first_landed_at
        receive_s = 0.0 if first is None else self._last_landed_at - first
        return [
            Verified(first_tokens=commit.first_tokens, receive_s=receive_s, numerics_class=commit.numerics_class),
            AnswerCommit(),
            # The sender repeats a commit whose answer it did not see.
            ForgetAt(at=now + self._lease_s),
        ]

    def _break(self, error: TransferError) -> list[ReceiveEffect]:
        """No commit can succeed any more. The blocks stay reserved until the router renews the ticket or lets go."""
        is_committing = self.state is ReceiveState.COMMITTING
        if self.state is not ReceiveState.BROKEN:
            self._error = error
        self.state = ReceiveState.BROKEN
        return [AnswerCommit(error=error)] if is_committing else []

    def _cancel(self, error: PdserveError | None) -> list[ReceiveEffect]:
        is_committing = self.state is ReceiveState.COMMITTING
        self.state = ReceiveState.CANCELLING
        self._error = error
        if is_committing:
            return [AnswerCommit(error=error or transfer_errors.given_up()), CancelReceives()]
        return [CancelReceives()]

    def _note_arrival(self, now: float) -> None:
        if self._first_landed_at is None:
            self._first_landed_at = now
        self._last_landed_at = now

    def _renew_lease(self, now: float) -> None:
        self.deadline = max(self.deadline, now + self._lease_s)

    def _require_outstanding(self, index: int) -> None:
        if not 0 <= index < len(self._digests) or self._digests[index] is not None or index in self._lost:
            raise transfer_errors.not_outstanding(index, self._shape)
