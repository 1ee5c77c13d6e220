"""The state machine of a request: where it stands, how it came there, and which moves there are. Pure.

QUEUED -> RESERVED -> PREFILLING -> DECODING -> FINISHED | FAILED | CANCELLED
             ^------------- RETRYING <-------------'
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import RequestId, WorkerId


class RequestState(StrEnum):
    """Where a request stands."""

    QUEUED = "queued"
    RESERVED = "reserved"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    RETRYING = "retrying"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether the request is over."""
        return not TRANSITIONS[self]


_S = RequestState
_ABANDONED = frozenset({_S.RETRYING, _S.FAILED, _S.CANCELLED})

#: Every legal move. Within one attempt no state comes twice; RETRYING begins the next attempt.
TRANSITIONS: dict[RequestState, frozenset[RequestState]] = {
    # Straight to PREFILLING when one token is asked for: no decode worker is needed.
    _S.QUEUED: _ABANDONED | {_S.RESERVED, _S.PREFILLING},
    # Straight to DECODING when the decode worker prefilled by itself.
    _S.RESERVED: _ABANDONED | {_S.PREFILLING, _S.DECODING},
    # Straight to FINISHED when the first token ended it.
    _S.PREFILLING: _ABANDONED | {_S.DECODING, _S.FINISHED},
    _S.DECODING: _ABANDONED | {_S.FINISHED},
    # Back to QUEUED when no worker has room at the moment.
    _S.RETRYING: frozenset({_S.QUEUED, _S.RESERVED, _S.PREFILLING, _S.FAILED, _S.CANCELLED}),
    _S.FINISHED: frozenset(),
    _S.FAILED: frozenset(),
    _S.CANCELLED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The request entered `state` of `attempt` at `at` (Unix time)."""

    state: RequestState
    attempt: int
    at: float

    @property
    def mark(self) -> str:
        """Names the state and the attempt: what a compare-and-set compares."""
        return f"{self.state}:{self.attempt}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestProgress:
    """A request's way so far. Each move gives a new value; no mark comes twice in a history."""

    request_id: RequestId
    history: tuple[Step, ...]
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    #: How it ended: a finish reason, or what went wrong. Empty while it runs.
    outcome: str = ""

    @classmethod
    def begin(cls, request_id: RequestId, *, at: float) -> RequestProgress:
        """A request that was just accepted: QUEUED, attempt 1."""
        return cls(request_id=request_id, history=(Step(state=RequestState.QUEUED, attempt=1, at=at),))

    @property
    def state(self) -> RequestState:
        """Where the request stands."""
        return self.history[-1].state

    @property
    def attempt(self) -> int:
        """The number of the current attempt, from 1."""
        return self.history[-1].attempt

    @property
    def mark(self) -> str:
        """State and attempt in one word."""
        return self.history[-1].mark

    def advance(
        self,
        state: RequestState,
        *,
        at: float,
        prefill_worker: WorkerId | None = None,
        decode_worker: WorkerId | None = None,
        outcome: str = "",
    ) -> RequestProgress:
        """The request after a move to `state`; what is not given stays as it is. RETRYING counts the attempt up.

        Raises:
            InvalidTransition: there is no such move; the message tells the request's story.
        """
        if state not in TRANSITIONS[self.state]:
            raise InvalidTransition(
                f"Request {self.request_id} cannot go from {self.state} to {state}. Its way so far: {self.story()}."
            )
        attempt = self.attempt + (state is RequestState.RETRYING)
        return replace(
            self,
            history=(*self.history, Step(state=state, attempt=attempt, at=at)),
            prefill_worker=prefill_worker or self.prefill_worker,
            decode_worker=decode_worker or self.decode_worker,
            outcome=outcome or self.outcome,
        )

    def story(self) -> str:
        """The history in one line: `queued:1 +0.000 s, reserved:1 +0.012 s, ...`."""
        start = self.history[0].at
        return ", ".join(f"{step.mark} +{step.at - start:.3f} s" for step in self.history)
