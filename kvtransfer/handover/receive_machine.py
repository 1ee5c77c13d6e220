"""One transfer at the decode worker, free of I/O: events in, effects out, time is an argument.

RECEIVING --commit--> COMMITTING --all is here, digests equal--> COMMITTED
    |  message lost      | message lost, digests differ
    +-----> BROKEN <-----+            BROKEN: no commit can succeed; the reservation waits for a new ticket
any of the three --abort, lease over--> CANCELLING --quiet--> RELEASED
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

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
from kvtransfer.handover.layer_groups import message_name, messages
from pdserve.base.errors import (
    DigestMismatch,
    InvalidTransition,
    PdserveError,
    StaleAttempt,
    TransferError,
    TransferTimeout,
)


class ReceiveState(Enum):
    """Where a transfer is at the decode worker."""

    RECEIVING = "receiving"
    COMMITTING = "committing"
    BROKEN = "broken"
    CANCELLING = "cancelling"
    COMMITTED = "committed"
    RELEASED = "released"


class ReceiveMachine:
    """One transfer at the decode worker. The lease is renewed by every sign of progress."""

    def __init__(
        self, *, num_bundles: int, layer_groups: int, attempt: int, lease_s: float, now: float, unit: str = "block"
    ) -> None:
        self.state = ReceiveState.RECEIVING
        self.num_received = 0
        self.deadline = now + lease_s
        self._attempt = attempt
        self._lease_s = lease_s
        self._num_bundles = num_bundles
        self._layer_groups = layer_groups
        self._unit = unit
        self._received: list[bytes | None] = [None] * (num_bundles * layer_groups)
        self._lost: set[int] = set()
        self._commit: CommitArrived | None = None
        self._error: PdserveError | None = None

    @property
    def num_outstanding(self) -> int:
        """Messages whose receive has neither completed nor failed."""
        return len(self._received) - self.num_received - len(self._lost)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Moves on.

        Raises: InvalidTransition; StaleAttempt for a commit of another attempt; the machine is then unchanged.
        """
        handler = _RECEIVE_TABLE.get((self.state, type(event)))
        if handler is None:
            raise InvalidTransition(f"a transfer that is {self.state.value} does not take {event!r}")
        return handler(self, event, now)

    def _on_received(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, MessageReceived)
        self._require_outstanding(event.index)
        self._received[event.index] = event.digest
        self.num_received += 1
        if self.state is ReceiveState.CANCELLING:
            return []
        self._renew(now)
        return self._try_commit() if self.state is ReceiveState.COMMITTING else []

    def _on_lost(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, MessageLost)
        self._require_outstanding(event.index)
        self._lost.add(event.index)
        return [] if self.state is ReceiveState.CANCELLING else self._break(event.error)

    def _on_commit(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, CommitArrived)
        self._require_attempt(event)
        self._renew(now)
        if len(event.digests) != len(self._received):
            return self._break(DigestMismatch(f"the commit has {len(event.digests)} digests for {self._messages}"))
        self._commit = event
        self.state = ReceiveState.COMMITTING
        return self._try_commit()

    def _on_commit_again(self, event: Event, now: float) -> list[Effect]:
        """The sender did not see our answer: the same commit gets the same answer, another one is refused."""
        assert isinstance(event, CommitArrived)
        self._require_attempt(event)
        if event != self._commit:
            raise StaleAttempt("another commit of this transfer came first")
        return [AnswerCommit()] if self.state is ReceiveState.COMMITTED else []

    def _on_commit_refused(self, event: Event, now: float) -> list[Effect]:
        assert isinstance(event, CommitArrived)
        self._require_attempt(event)
        return [AnswerCommit(error=self._error or StaleAttempt("the transfer was given up"))]

    def _on_kept(self, event: Event, now: float) -> list[Effect]:
        self._renew(now)
        return []

    def _on_abort(self, event: Event, now: float) -> list[Effect]:
        return self._cancel(None)

    def _on_time(self, event: Event, now: float) -> list[Effect]:
        if now < self.deadline:
            return []
        return self._cancel(
            TransferTimeout(f"no progress for {self._lease_s:g} s; {self.num_received} of {self._messages} had arrived")
        )

    def _on_quiet(self, event: Event, now: float) -> list[Effect]:
        self.state = ReceiveState.RELEASED
        return [Released(error=self._error)]

    def _ignore(self, event: Event, now: float) -> list[Effect]:
        return []

    def _try_commit(self) -> list[Effect]:
        assert self._commit is not None
        if self.num_outstanding:
            return []
        wrong = [
            index
            for index, (mine, theirs) in enumerate(zip(self._received, self._commit.digests, strict=True))
            if mine != theirs
        ]
        if wrong:
            return self._break(
                DigestMismatch(
                    f"{len(wrong)} of {self._messages} are not what was sent, "
                    f"the first is {message_name(wrong[0], self._layer_groups, self._unit)}"
                )
            )
        self.state = ReceiveState.COMMITTED
        return [Verified(), AnswerCommit()]

    def _break(self, error: TransferError) -> list[Effect]:
        """No commit can succeed any more. The blocks stay reserved: the router asks for a new ticket, or lets go."""
        waiting = self.state is ReceiveState.COMMITTING or isinstance(error, DigestMismatch)
        if self.state is not ReceiveState.BROKEN:
            self._error = error
        self.state = ReceiveState.BROKEN
        return [AnswerCommit(error=error)] if waiting else []

    def _cancel(self, error: PdserveError | None) -> list[Effect]:
        waiting = self.state is ReceiveState.COMMITTING
        self.state = ReceiveState.CANCELLING
        self._error = error
        answer: list[Effect] = [AnswerCommit(error=error or StaleAttempt("the transfer was given up"))]
        return [*(answer if waiting else []), CancelReceives()]

    def _renew(self, now: float) -> None:
        self.deadline = max(self.deadline, now + self._lease_s)

    def _require_outstanding(self, index: int) -> None:
        if not 0 <= index < len(self._received) or self._received[index] is not None or index in self._lost:
            name = message_name(index, self._layer_groups, self._unit)
            raise InvalidTransition(f"{name} of {self._messages} is not outstanding")

    @property
    def _messages(self) -> str:
        return messages(self._num_bundles, self._layer_groups, self._unit)

    def _require_attempt(self, event: CommitArrived) -> None:
        if event.attempt != self._attempt:
            raise StaleAttempt(f"the commit is of attempt {event.attempt}, the ticket of attempt {self._attempt}")


_ReceiveHandler = Callable[[ReceiveMachine, Event, float], list[Effect]]


def _rows(
    states: Sequence[ReceiveState], moves: dict[type[Event], _ReceiveHandler]
) -> dict[tuple[ReceiveState, type[Event]], _ReceiveHandler]:
    return {(state, event): handler for state in states for event, handler in moves.items()}


_R = ReceiveMachine
_RECEIVE_TABLE: dict[tuple[ReceiveState, type[Event]], _ReceiveHandler] = (
    _rows(
        [ReceiveState.RECEIVING, ReceiveState.COMMITTING, ReceiveState.BROKEN],
        {
            MessageReceived: _R._on_received,
            MessageLost: _R._on_lost,
            LeaseKept: _R._on_kept,
            Aborted: _R._on_abort,
            TimePassed: _R._on_time,
        },
    )
    | _rows([ReceiveState.RECEIVING], {CommitArrived: _R._on_commit})
    | _rows([ReceiveState.COMMITTING], {CommitArrived: _R._on_commit_again})
    | _rows([ReceiveState.BROKEN], {CommitArrived: _R._on_commit_refused})
    | _rows(
        [ReceiveState.CANCELLING],
        {
            MessageReceived: _R._on_received,
            MessageLost: _R._on_lost,
            CommitArrived: _R._on_commit_refused,
            LeaseKept: _R._ignore,
            Aborted: _R._ignore,
            TimePassed: _R._ignore,
            Quiet: _R._on_quiet,
        },
    )
    | _rows([ReceiveState.COMMITTED], {CommitArrived: _R._on_commit_again})
    | _rows([ReceiveState.RELEASED], {CommitArrived: _R._on_commit_refused})
    | _rows(
        [ReceiveState.COMMITTED, ReceiveState.RELEASED],
        {LeaseKept: _R._ignore, Aborted: _R._ignore, TimePassed: _R._ignore},
    )
)
