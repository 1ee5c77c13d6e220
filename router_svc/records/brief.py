"""A request in a list of requests: the decision record without what only its own page shows. Never any text."""

from __future__ import annotations

from collections.abc import Iterable

from router_svc.records.entries import Incident
from router_svc.records.record import Json, Record


def brief_of(record: Record) -> dict[str, Json]:
    """The fields of a list entry. Names and meanings are those of `Record.as_json`."""
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
            "finish_reasons": list(record.finish_reasons),
            "error": record.error,
            "completion_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens,
        },
        "phases": {phase.value: round(at, 6) for phase, at in record.phases.items()},
        "timeline": record.phase_starts(),
        "prefilled_by": record.prefilled_by,
        "local_prefill_reason": record.local_prefill_reason,
        "workers": list(dict.fromkeys(decision.worker for decision in record.decisions)),
        "retries": _reasons(record.retries),
        "fallbacks": _reasons(record.fallbacks),
    }


def _reasons(incidents: Iterable[Incident]) -> list[Json]:
    return [incident.reason for incident in incidents]
