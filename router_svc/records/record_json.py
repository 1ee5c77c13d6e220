"""A request's decision record as JSON, as an entry of a list of requests, and as the line of a log. Never any text.

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

Phases, decisions and list entries appear only once they have happened. Of decisions, retries, fallbacks, migrations and
pauses, the lists have the first and the last 32; of chunks, those of the first and the last 128 reports.
"""

from __future__ import annotations

from collections.abc import Iterable

import pdserve
from router_svc.records.decisions import ComputedChunk, Decision, Incident, chunks_of
from router_svc.records.events import FellBack, MoveStarted, Retried, WorkerChosen
from router_svc.records.migration import Migration
from router_svc.records.pauses import Pause, pauses_of
from router_svc.records.prefill import reported_of
from router_svc.records.record import Record

#: An entry of a list.
Entry = ComputedChunk | Decision | Incident | Migration | Pause
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


def as_json(record: Record) -> dict[str, Json]:
    """The record as JSON; see the module's docstring."""
    log = record.log
    details: dict[str, Json] = {
        "tenant": record.tenant,
        "trace_id": None if record.trace is None else record.trace.trace_id,
        "router": pdserve.__version__,
        "seconds_in": {phase.value: round(seconds, 6) for phase, seconds in record.seconds_in().items()},
        "chunks": [_fields_of(chunk) for chunk in chunks_of(log)],
        "decisions": [_fields_of(decision) for decision in record.decisions],
        "retries": [_fields_of(incident) for incident in record.retries],
        "fallbacks": [_fields_of(incident) for incident in record.fallbacks],
        "migrations": [_fields_of(migration) for migration in record.migrations],
        "pauses": [_fields_of(pause) for pause in pauses_of(log)],
        "counts": {
            "decisions": log.num(WorkerChosen),
            "retries": log.num(Retried),
            "fallbacks": log.num(FellBack),
            "migrations": log.num(MoveStarted),
        },
        "grammar_sha256": record.grammar_sha256,
        "resumed_tokens": record.resumed_tokens,
        "reported": {**reported_of(log)},
    }
    return _common(record) | details


def brief_of(record: Record) -> dict[str, Json]:
    """The fields of a list entry: without what only the request's own page shows."""
    return _common(record) | {
        "workers": list(_workers(record)),
        "retries": _reasons(record.retries),
        "fallbacks": _reasons(record.fallbacks),
    }


def log_fields_of(record: Record) -> dict[str, object]:
    """The fields of the log line that ends a request."""
    end, prefill = record.end, record.prefill
    fields: dict[str, object] = {
        "request_id": record.request_id,
        "state": record.state.value,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "completion_tokens": record.completion_tokens,
        "finish": ",".join(() if end is None else end.finish_reasons) or None,
        "prefilled_by": prefill.tier,
        "local_prefill_reason": prefill.local_reason,
        "workers": ",".join(_workers(record)) or None,
        "attempts": record.attempt,
    }
    fields |= {f"{phase}_s": at for phase, at in record.milestones.items()}
    fields |= {
        "retries": ",".join(incident.reason for incident in record.retries) or None,
        "fallbacks": ",".join(incident.reason for incident in record.fallbacks) or None,
        "error": None if end is None else end.error,
        "migrations": ",".join(f"{each.reason}:{each.outcome}" for each in record.migrations) or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _common(record: Record) -> dict[str, Json]:
    end, prefill = record.end, record.prefill
    return {
        "request_id": record.request_id,
        "endpoint": record.endpoint,
        "accepted_at": record.accepted_at,
        "prompt_tokens": record.prompt_tokens,
        "max_tokens": record.max_tokens,
        "n": record.n,
        "state": record.state.value,
        "attempt": record.attempt,
        "outcome": {
            "finish_reasons": [] if end is None else list(end.finish_reasons),
            "error": None if end is None else end.error,
            "completion_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens,
        },
        "phases": {milestone.value: round(at, 6) for milestone, at in record.milestones.items()},
        "timeline": [{"phase": start.phase.value, "at": round(start.at, 6)} for start in record.timeline.starts],
        "prefilled_by": prefill.tier,
        "local_prefill_reason": prefill.local_reason,
    }


def _fields_of(entry: Entry) -> dict[str, Json]:
    """The fields of an entry, none of which is an object. `asdict` would copy them deeply, for half of the time."""
    return {name: getattr(entry, name) for name in entry.__slots__}


def _workers(record: Record) -> Iterable[str]:
    """The workers that were chosen, each once."""
    return dict.fromkeys(decision.worker for decision in record.decisions)


def _reasons(incidents: Iterable[Incident]) -> list[Json]:
    return [incident.reason for incident in incidents]
