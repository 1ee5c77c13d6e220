"""What became of one request, as its client saw it, and a fault that was carried out. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.cli.chaos.answers import Answer
from pdserve.cli.chaos.workload import Sending

COMPLETE, LEFT, FAILED = "complete", "left", "failed"


@dataclass(slots=True, kw_only=True)
class Outcome:
    """One request from its client's view. Times are Unix times in seconds."""

    sending: Sending
    request_id: str
    started_at: float
    ended_at: float = 0.0
    status: str = FAILED
    error: str | None = None
    answer: Answer = field(default_factory=Answer)
    token_times: list[float] = field(default_factory=list)
    #: When it turned to which router.
    routers: list[tuple[float, int]] = field(default_factory=list)
    num_resumed: int = 0
    num_repeated: int = 0
    #: The router's decision record; None if no router has it any more.
    trace: dict[str, object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that was carried out. `at` is Unix time; `target` is a process, or a request's number."""

    at: float
    kind: str
    target: str
    duration_s: float
