"""Pauses in a request's output: those behind a lost worker, and any other that a reader notices."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

#: Time between two messages with tokens from which on the output has stalled.
STALL_S = 1.0
#: Later pauses of a request are counted, but not listed.
MAX_PAUSES = 64


class StallReason(StrEnum):
    """Why output has stalled. The values are labels of a metric."""

    #: A worker was lost, or has failed the request.
    RECOVERY = "recovery"
    #: The request was moving to another decode worker.
    MOVE = "move"
    #: Neither: a busy or stopped worker, preemption, or a client that reads slowly.
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Time without tokens, as the decision record has it."""

    #: Start, in seconds since the request was accepted.
    at: float
    seconds: float
    #: Tokens of all choices before it.
    completion_tokens: int
    #: The error behind which the output went on, else a `StallReason`.
    reason: str


class PauseCounters(Protocol):
    """Where pauses are counted."""

    def recovered(self, error: str, seconds: float) -> None:
        """An output has gone on, so long after its last tokens."""

    def stalled(self, reason: StallReason) -> None:
        """An output has stalled."""


class Pauses:
    """Finds the pauses of one request."""

    def __init__(self, metrics: PauseCounters, noted: list[Pause]) -> None:
        """Pauses are added to `noted`."""
        self._metrics = metrics
        self._noted = noted
        #: The error behind which the output is to go on; empty without one.
        self.error = ""

    def went_on(self, at: float, seconds: float, completion_tokens: int, *, is_moving: bool) -> None:
        """New tokens are there, `seconds` after the last ones at `at`; `completion_tokens` came before."""
        error, self.error = self.error, ""
        if error:
            self._metrics.recovered(error, seconds)
        if not error and seconds < STALL_S:
            return
        reason = StallReason.RECOVERY if error else StallReason.MOVE if is_moving else StallReason.OTHER
        if seconds >= STALL_S:
            self._metrics.stalled(reason)
        if len(self._noted) < MAX_PAUSES:
            self._noted.append(
                Pause(at=at, seconds=seconds, completion_tokens=completion_tokens, reason=error or reason)
            )
