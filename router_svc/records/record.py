"""A request's decision record: what happened when, on which workers and why, and what was retried or fell back.

`as_json` is the answer of `GET /v1/requests/{id}/trace` and the form kept in Redis. Times are seconds since the request
was accepted, on the router's clock. Exceptions are `accepted_at` (Unix time) and the durations under `reported`, which
the workers measured.

    {
      "request_id": "cmpl-...",       "endpoint": "/v1/completions",    "router": "0.1.0",
      "trace_id": null,               the W3C trace that the request belongs to, in hexadecimal
      "accepted_at": 1790000000.123,
      "prompt_tokens": 300,  "max_tokens": 16,  "n": 1,
      "state": "finished",            queued|scoring|reserved|prefilling|decoding|retrying|finished|failed|cancelled
      "attempt": 1,
      "outcome": {"finish_reasons": ["stop"], "error": null, "completion_tokens": 12, "cached_tokens": 288},
      "phases": {"admitted": 0.001, "reserved": 0.004, "prefill_start": 0.006, "first_token": 0.08, "commit": 0.085,
                 "first_decode": 0.09, "first_write": 0.081, "finish": 0.3},
      "seconds_in": {"queue": 0.001, "reserve": 0.003, "prefill": 0.076, "wire": 0.004, "decode": 0.216},
      "chunks": [{"at": 0.03, "computed_tokens": 256}],
      "decisions": [{"at": 0.002, "attempt": 1, "tier": "decode", "worker": "decode-0", "epoch": 7, "why": "..."}],
      "retries":   [{"at": 0.05, "attempt": 1, "reason": "peer_lost", "worker": "prefill-0", "error": "Lost ..."}],
      "fallbacks": [{"at": 0.05, "attempt": 2, "reason": "prefill_lost", "worker": "decode-0", "error": null}],
      "migrations": [{"at": 0.1, "reason": "drain", "source": "decode-0", "target": "decode-1", "is_copied": true,
                      "ended_at": 0.13, "outcome": "moved", "sent_blocks": 9, "pause_s": 0.01, "error": null}],
      "pauses":    [{"at": 0.12, "seconds": 0.07, "completion_tokens": 9, "reason": "peer_lost"}],
      "counts": {"decisions": 1, "retries": 1, "fallbacks": 1, "migrations": 1},    with those that no list has
      "prefilled_by": "prefill",      prefill|decode|null
      "grammar_sha256": null,         of the text of the grammar that the output has to match, in hexadecimal
      "resumed_tokens": null,         tokens that the router had from which the request was resumed
      "local_prefill_reason": null,   short|load|fallback|no_prefill_tier, where prefilled_by is "decode"
      "reported": {"reserve_s": 0.001, "prefill_queue_s": 0.0, "prefill_compute_s": 0.07, "transfer_s": 0.003,
                   "commit_s": 0.004, "exposed_s": 0.002, "decode_queue_s": 0.001, "sent_bytes": 1234,
                   "sent_blocks": 19, "chunks": 2}
    }

`seconds_in` is where the time went, over all attempts; it adds up to `finish`, or to the time so far.

Phases, decisions and list entries appear only once they have happened. Of decisions, retries, fallbacks and migrations,
the lists have the first and the last 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from hashlib import sha256

import pdserve
from pdserve.base.ids import RequestId, WorkerId
from pdserve.base.trace_context import TraceContext
from pdserve.peers.workers import WorkerRecord
from router_svc.generation import Generation
from router_svc.records.entries import ComputedChunk, Decision, Entries, Incident
from router_svc.records.migration import Migration
from router_svc.records.pauses import Pause
from router_svc.records.request_state import RequestProgress, RequestState
from router_svc.records.timeline import Phase, Timeline
from router_svc.routing.local_prefill import LocalPrefillReason

#: Later chunks are counted in `reported` but not listed one by one.
MAX_CHUNKS = 256

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


class TracePhase(StrEnum):
    """Events in a request's life whose time is recorded, in the order of a request without faults."""

    ADMITTED = "admitted"
    RESERVED = "reserved"
    PREFILL_START = "prefill_start"
    FIRST_TOKEN = "first_token"
    FIRST_WRITE = "first_write"
    COMMIT = "commit"
    FIRST_DECODE = "first_decode"
    FINISH = "finish"


@dataclass(slots=True, kw_only=True)
class Record:
    """The decision record of one prompt. Only its `Journal` writes to it."""

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
    progress: RequestProgress
    phases: dict[TracePhase, float] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=Timeline)
    chunks: list[ComputedChunk] = field(default_factory=list)
    decisions: Entries[Decision] = field(default_factory=Entries)
    retries: Entries[Incident] = field(default_factory=Entries)
    fallbacks: Entries[Incident] = field(default_factory=Entries)
    migrations: Entries[Migration] = field(default_factory=Entries)
    pauses: list[Pause] = field(default_factory=list)
    reported: dict[str, float] = field(default_factory=dict)
    prefilled_by: str | None = None
    local_prefill_reason: LocalPrefillReason | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    #: The digest of the grammar that the output has to match, in hexadecimal; None: there is none. Its text is in no
    #: record and no log, for it is the client's.
    grammar_sha256: str | None = None
    #: Tokens that another router had, from which the request was resumed; None: it was not.
    resumed_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None
    #: Whose request it is; empty without API keys.
    tenant: str = ""
    #: The request's span, of this router or of the client.
    trace: TraceContext | None = None

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

    @property
    def state(self) -> RequestState:
        """The request's state."""
        return self.progress.state

    @property
    def attempt(self) -> int:
        """The number of the current attempt, from 1."""
        return self.progress.attempt

    def move(self, state: RequestState, *, worker: WorkerRecord | None = None, outcome: str = "") -> None:
        """Advances the request's state machine. Raises `InvalidTransition`."""
        self.progress = self.progress.advance(
            state,
            at=self.accepted_at + self.elapsed_s(),
            prefill_worker=worker.worker_id if worker is not None and worker.tier == "prefill" else None,
            decode_worker=worker.worker_id if worker is not None and worker.tier == "decode" else None,
            outcome=outcome,
        )

    def elapsed_s(self) -> float:
        """Seconds since the request was accepted."""
        return self.clock() - self.accepted_clock

    def mark(self, phase: TracePhase, *, ago_s: float = 0.0) -> bool:
        """Records that the phase happened `ago_s` seconds ago. Only the first call counts; later ones return False."""
        if phase in self.phases:
            return False
        self.phases[phase] = max(0.0, self.elapsed_s() - ago_s)
        return True

    def enter(self, phase: Phase, *, ago_s: float = 0.0) -> None:
        """The request is in this phase since `ago_s` seconds ago."""
        self.timeline.enter(phase, self.elapsed_s() - ago_s)

    def seconds_in(self) -> dict[Phase, float]:
        """Time spent in every phase, until the end or until now."""
        end = self.phases.get(TracePhase.FINISH)
        return self.timeline.seconds(self.elapsed_s() if end is None else end)

    def phase_starts(self) -> list[Json]:
        """The phases in order as JSON, each with the time it began at; a retry leads back to an earlier one."""
        return [{"phase": start.phase.value, "at": round(start.at, 6)} for start in self.timeline.starts]

    def add_decision(self, worker: WorkerRecord, why: str) -> None:
        """Records the choice of a worker."""
        self.decisions.append(
            Decision(
                at=self.elapsed_s(),
                attempt=self.attempt,
                tier=worker.tier,
                worker=worker.worker_id,
                epoch=worker.epoch,
                why=why,
            )
        )

    def incident(self, reason: str, worker: WorkerId | None, error: Exception | None) -> Incident:
        """An entry for `retries` or `fallbacks`, timed now."""
        return Incident(
            at=self.elapsed_s(),
            attempt=self.attempt,
            reason=reason,
            worker=worker,
            error=None if error is None else str(error),
        )

    def add_chunk(self, computed_tokens: int) -> None:
        """Records that a chunk was computed."""
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(ComputedChunk(at=self.elapsed_s(), computed_tokens=computed_tokens))

    def summary(self) -> dict[str, object]:
        """The fields of the log line that ends a request."""
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "state": self.state.value,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish": ",".join(self.finish_reasons) or None,
            "prefilled_by": self.prefilled_by,
            "local_prefill_reason": self.local_prefill_reason,
            "workers": ",".join(dict.fromkeys(decision.worker for decision in self.decisions)) or None,
            "attempts": self.attempt,
        }
        fields |= {f"{phase}_s": at for phase, at in self.phases.items()}
        fields |= {"retries": ",".join(incident.reason for incident in self.retries) or None}
        fields |= {"fallbacks": ",".join(incident.reason for incident in self.fallbacks) or None, "error": self.error}
        fields |= {"migrations": ",".join(f"{each.reason}:{each.outcome}" for each in self.migrations) or None}
        return {name: value for name, value in fields.items() if value is not None}

    def as_json(self) -> dict[str, Json]:
        """The record as JSON; see the module's docstring."""
        return {
            "request_id": self.request_id,
            "endpoint": self.endpoint,
            "tenant": self.tenant,
            "trace_id": None if self.trace is None else self.trace.trace_id,
            "router": pdserve.__version__,
            "accepted_at": self.accepted_at,
            "prompt_tokens": self.prompt_tokens,
            "max_tokens": self.max_tokens,
            "n": self.n,
            "state": self.state.value,
            "attempt": self.attempt,
            "outcome": {
                "finish_reasons": list(self.finish_reasons),
                "error": self.error,
                "completion_tokens": self.completion_tokens,
                "cached_tokens": self.cached_tokens,
            },
            "phases": {phase.value: round(at, 6) for phase, at in self.phases.items()},
            "timeline": self.phase_starts(),
            "seconds_in": {phase.value: round(seconds, 6) for phase, seconds in self.seconds_in().items()},
            "chunks": [asdict(chunk) for chunk in self.chunks],
            "decisions": [asdict(decision) for decision in self.decisions],
            "retries": [asdict(incident) for incident in self.retries],
            "fallbacks": [asdict(incident) for incident in self.fallbacks],
            "migrations": [asdict(migration) for migration in self.migrations],
            "pauses": [asdict(pause) for pause in self.pauses],
            "counts": self._counts(),
            "prefilled_by": self.prefilled_by,
            "grammar_sha256": self.grammar_sha256,
            "resumed_tokens": self.resumed_tokens,
            "local_prefill_reason": self.local_prefill_reason,
            "reported": dict(self.reported),
        }

    def _counts(self) -> dict[str, Json]:
        return {
            "decisions": self.decisions.total,
            "retries": self.retries.total,
            "fallbacks": self.fallbacks.total,
            "migrations": self.migrations.total,
        }


def _digest(grammar: str) -> str | None:
    return sha256(grammar.encode()).hexdigest() if grammar else None
