"""The state machine of a request: its state, its history and the legal transitions. Pure.

QUEUED -> SCORING -> RESERVED -> PREFILLING -> DECODING -> FINISHED | FAILED | CANCELLED
             ^------------------ RETRYING <------------------'

Only a request for log-probabilities of its prompt is ever SCORING.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import RequestId, WorkerId


class RequestState(StrEnum):
    """The states of a request."""

    QUEUED = "queued"
    SCORING = "scoring"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RETRYING = "retrying"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the request has ended."""
        return not TRANSITIONS[self]


_S = RequestState
_ABANDONED = frozenset({_S.RETRYING, _S.FAILED, _S.CANCELLED})

#: Every legal transition. No state occurs twice within an attempt; RETRYING starts the next attempt.
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    # Straight to PREFILLING when one token is requested: no decode worker is needed. Straight to FINISHED when the
    # router that the request was resumed from had all of its output, or no token is requested.
    _S.QUEUED: _ABANDONED | {_S.SCORING, _S.RESERVED, _S.PREFILLING, _S.FINISHED},
    # Straight to PREFILLING or FINISHED for the same reasons as from QUEUED.
    _S.SCORING: _ABANDONED | {_S.RESERVED, _S.PREFILLING, _S.FINISHED},
    # Straight to DECODING when the decode worker prefilled locally.
    _S.RESERVED: _ABANDONED | {_S.PREFILLING, _S.DECODING},
    # Straight to FINISHED when the first token ended it.
    _S.PREFILLING: _ABANDONED | {_S.DECODING, _S.FINISHED},
    _S.DECODING: _ABANDONED | {_S.FINISHED},
    # RETRYING again when a worker has refused the attempt before it reached a state of its own.
    _S.RETRYING: _ABANDONED | {_S.SCORING, _S.RESERVED, _S.PREFILLING},
    _S.FINISHED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateChange:
    """The entry into `state` of `attempt` at `at` (Unix time)."""

    state: RequestState
    attempt: int
    at: float

    @property
    def mark(self) -> str:
        """State and attempt as one word, which a compare-and-set compares."""
        return f"{self.state}:{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """A request's history so far. Each transition gives a new value; no mark occurs twice in a history."""

    request_id: RequestId
    history: tuple[StateChange, ...]
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    #: The finish reasons, or the error's class. Empty while the request runs.
    outcome: str = ""

    @classmethod
    def new(cls, request_id: RequestId, *, at: float) -> RequestProgress:
        """A request that was just accepted: QUEUED, attempt 1."""
        return cls(request_id=request_id, history=(StateChange(state=RequestState.QUEUED, attempt=1, at=at),))

    @property
    def state(self) -> RequestState:
        """The current state."""
        return self.history[-1].state

    @property
    def attempt(self) -> int:
        """The number of the current attempt, from 1."""
        return self.history[-1].attempt

    @property
    def mark(self) -> str:
        """The mark of the current state."""
        return self.history[-1].mark

    def advance(self, state: RequestState, *, at: float) -> RequestProgress:
        """The request after a transition to `state` at `at` (Unix time). RETRYING increments the attempt.

        Raises:
            InvalidTransition: the table has no such transition; the message includes the history.
        """
        if state not in TRANSITIONS[self.state]:
            raise InvalidTransition(
                f"Request {self.request_id} cannot go from {self.state} to {state}. Its history: {self.story()}."
            )
        attempt = self.attempt + (state is RequestState.RETRYING)
        return replace(self, history=(*self.history, StateChange(state=state, attempt=attempt, at=at)))

    def story(self) -> str:
        """The history in one line: `queued:1 +0.000 s, reserved:1 +0.012 s, ...`."""
        start = self.history[0].at
        return ", ".join(f"{step.mark} +{step.at - start:.3f} s" for step in self.history)
