"""A request's decision record: what is known of it from the start, and the log of what has happened since.

A record has what is known from the start, the sums of all events (`progress`, the tokens), and the log. All else is a
pure function of the log, in the module of its subject: `milestones`, `timeline`, `decisions`, `prefill`, `migration`,
`pauses`. What several readers use is a property here; `record_json` has the whole record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from pdserve.base.ids import RequestId
from pdserve.base.trace_context import TraceContext
from router_svc.generation import Generation
from router_svc.records.decisions import Decision, Incident, decisions_of, fallbacks_of, retries_of
from router_svc.records.event_log import EventLog
from router_svc.records.events import Ended, Event
from router_svc.records.migration import Migration, migrations_of
from router_svc.records.milestones import Milestone, milestones_of
from router_svc.records.pauses import LastTokens
from router_svc.records.prefill import PromptPrefill, cached_tokens_of, prefill_of
from router_svc.records.request_state import RequestProgress, RequestState
from router_svc.records.timeline import Phase, Timeline, timeline_of
from router_svc.records.transitions import progress_after


@dataclass(slots=True, kw_only=True)
class Record:
    """The decision record of one prompt. Only its `Journal` writes to it. Times are seconds since it was accepted."""

    request_id: RequestId
    endpoint: str
    prompt_tokens: int
    max_tokens: int
    n: int
    #: Unix time.
    accepted_at: float
    #: Monotonic clock in seconds, and its reading when the request was accepted.
    clock: Callable[[], float]
    accepted_clock: float
    #: The digest of the grammar that the output has to match, in hexadecimal; None: there is none. Its text is in no
    #: record and no log, for it is the client's.
    grammar_sha256: str | None = None
    #: Whose request it is; empty without API keys.
    tenant: str = ""
    #: The request's span, of this router or of the client.
    trace: TraceContext | None = None
    #: What follows from all events, with those that the log has forgotten.
    progress: RequestProgress
    log: EventLog = field(default_factory=EventLog)
    #: Tokens of all choices, with those of another router.
    completion_tokens: int = 0
    #: The latest tokens of this router; None: there are none.
    last_tokens: LastTokens | None = None
    #: Tokens that another router had, from which the request was resumed; None: it was not.
    resumed_tokens: int | None = None
    #: Prompt tokens that were cached for the tokens of the other router.
    resumed_cached_tokens: int = 0

    @classmethod
    def new(cls, generation: Generation, *, accepted_at: float, clock: Callable[[], float]) -> Record:
        """The record of a request that is accepted now. It does not keep the prompt."""
        return cls(
            request_id=generation.request_id,
            endpoint=generation.endpoint,
            tenant=generation.tenant,
            prompt_tokens=len(generation.prompt),
            max_tokens=generation.sampling.max_tokens,
            n=generation.sampling.n,
            grammar_sha256=_digest(generation.sampling.grammar),
            accepted_at=accepted_at,
            clock=clock,
            accepted_clock=clock(),
            progress=RequestProgress.new(generation.request_id, at=accepted_at),
        )

    def append(self, event: Event, *, at: float, call: TraceContext | None = None) -> None:
        """Adds an event that happens at `at`. Raises `InvalidTransition` if it cannot happen in the present state."""
        attempt = self.attempt
        self.progress = progress_after(self.progress, event, self.log, at=self.accepted_at + at)
        self.log.append(event, at=at, attempt=attempt, call=call)

    def elapsed_s(self) -> float:
        """Seconds since the request was accepted."""
        return self.clock() - self.accepted_clock

    @property
    def state(self) -> RequestState:
        """The request's state."""
        return self.progress.state

    @property
    def attempt(self) -> int:
        """The number of the current attempt, from 1."""
        return self.progress.attempt

    @property
    def end(self) -> Ended | None:
        """How the request has ended; None: it runs."""
        return self.log.last(Ended)

    @property
    def milestones(self) -> Mapping[Milestone, float]:
        """When each milestone was reached."""
        return self.log.view(milestones_of)

    @property
    def timeline(self) -> Timeline:
        """What the request has waited for."""
        return self.log.view(timeline_of)

    def seconds_in(self) -> dict[Phase, float]:
        """Time spent in every phase, until the end or until now."""
        end = self.milestones.get(Milestone.FINISH)
        return self.timeline.seconds(self.elapsed_s() if end is None else end)

    @property
    def decisions(self) -> list[Decision]:
        """The workers that were chosen."""
        return self.log.view(decisions_of)

    @property
    def retries(self) -> list[Incident]:
        """The failures behind which another attempt was made."""
        return self.log.view(retries_of)

    @property
    def fallbacks(self) -> list[Incident]:
        """The prefills by a decode worker that were not planned."""
        return self.log.view(fallbacks_of)

    @property
    def migrations(self) -> list[Migration]:
        """The moves between decode workers."""
        return self.log.view(migrations_of)

    @property
    def prefill(self) -> PromptPrefill:
        """Who has computed the prompt."""
        return self.log.view(prefill_of)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached when the prompt was computed for the first token."""
        cached = None if self.resumed_tokens else self.log.view(cached_tokens_of)
        return self.resumed_cached_tokens if cached is None else cached


def _digest(grammar: str) -> str | None:
    return sha256(grammar.encode()).hexdigest() if grammar else None
