"""Divides a request's time into phases: it is in exactly one at any time, so that they add up to its latency. Pure.

    accepted -> QUEUE -> RESERVE -> PREFILL -> WIRE -> DECODE -> ended
                            ^----- retry -------'

The phase that takes the largest share names the tier that is short: QUEUE and RESERVE wait for the decode tier,
PREFILL for the prefill tier, and WIRE for the handover between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from router_svc.records.event_log import EventLog
from router_svc.records.events import (
    Admitted,
    DecodeStarted,
    FirstDecoded,
    Prefilled,
    PrefillScored,
    Retried,
    WorkerChosen,
)


class Phase(StrEnum):
    """What a request waits for, in the order of a request without faults."""

    #: Admission by the router.
    QUEUE = "queue"
    #: A decode worker: its choice, its blocks, and its batch for a local prefill.
    RESERVE = "reserve"
    #: The prompt's tokens, queued at a prefill worker or computed on either tier.
    PREFILL = "prefill"
    #: The rest of the prompt's KV, after the first token.
    WIRE = "wire"
    #: The other tokens, and the client that reads them.
    DECODE = "decode"


_ORDER = list(Phase)


@dataclass(frozen=True, slots=True)
class PhaseStart:
    """The entry into a phase, in seconds since the request was accepted."""

    phase: Phase
    at: float


@dataclass(slots=True)
class Timeline:
    """The phases of one request so far."""

    starts: list[PhaseStart] = field(default_factory=lambda: [PhaseStart(Phase.QUEUE, 0.0)])
    #: Index of the first phase of the present attempt.
    _attempt: int = 0

    def enter(self, phase: Phase, at: float) -> None:
        """The request is in `phase` since `at`. Ignored if this attempt has reached the phase already.

        Reports of two workers have no order: a phase that is reported after a later one stands before it, and ends
        where that one began.
        """
        index = len(self.starts)
        while index > self._attempt and _ORDER.index(self.starts[index - 1].phase) > _ORDER.index(phase):
            index -= 1
        if index > self._attempt and self.starts[index - 1].phase is not phase:
            self._start(phase, at, index)

    def restart(self, at: float) -> None:
        """Another attempt begins: the request waits for a decode worker again."""
        self._attempt = len(self.starts)
        self._start(Phase.RESERVE, at, self._attempt)

    def seconds(self, end: float) -> dict[Phase, float]:
        """Time spent in every phase until `end`. Their sum is `end`."""
        total = dict.fromkeys(Phase, 0.0)
        ends = [start.at for start in self.starts[1:]] + [end]
        for start, until in zip(self.starts, ends, strict=True):
            total[start.phase] += until - start.at
        return total

    def _start(self, phase: Phase, at: float, index: int) -> None:
        # A duration that a worker measured can reach back beyond what the router has seen.
        start = max(at, self.starts[index - 1].at)
        if index < len(self.starts):
            start = min(start, self.starts[index].at)
        self.starts.insert(index, PhaseStart(phase, start))


def timeline_of(log: EventLog) -> Timeline:
    """The phases of a request, made from its events."""
    timeline = Timeline()
    for logged in log:
        match logged.event:
            case Admitted():
                timeline.enter(Phase.RESERVE, logged.at)
            case WorkerChosen(tier="prefill"):
                timeline.enter(Phase.PREFILL, logged.at)
            case DecodeStarted(is_prefilled_locally=True, computing_s=computing_s):
                timeline.enter(Phase.PREFILL, logged.at - computing_s)
            case DecodeStarted(queue_s=queue_s):
                timeline.enter(Phase.DECODE, logged.at - queue_s)
            case Prefilled(is_complete=False):
                timeline.enter(Phase.WIRE, logged.at)
            case FirstDecoded():
                timeline.enter(Phase.DECODE, logged.at)
            case Retried() | PrefillScored(has_output=True):
                timeline.restart(logged.at)
    return timeline
