"""The summary of a run: outcomes, faults, pauses, and each violation with what replays it. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pdserve.cli.chaos.answers import Answer, difference, head_difference
from pdserve.cli.chaos.faults import DECODE, PREFILL, ROUTER, is_kill
from pdserve.cli.chaos.outcome import COMPLETE, FAILED, LEFT, Injected, Outcome

WRONG = "wrong"
_PERCENTILES = (50, 90, 99)
#: Faults that stop no process: they hit one request or the machine.
_OF_CLIENTS = ("slow-reader", "disconnect")


def judge(outcome: Outcome, expected: Answer) -> tuple[str, str | None]:
    """`complete`, `left`, `wrong` or `failed`, and the reason of the last two."""
    if outcome.status == LEFT:
        found = head_difference(outcome.answer, expected)
        return (WRONG, found) if found else (LEFT, None)
    if outcome.status != COMPLETE:
        return FAILED, outcome.error
    found = difference(outcome.answer, expected)
    return (WRONG, found) if found else (COMPLETE, None)


def workers_at(outcome: Outcome, at: float) -> set[str]:
    """Names of the processes that the request needed at this Unix time, as far as the decision record says."""
    routers = [index for since, index in outcome.routers if since <= at]
    found = {f"{ROUTER}-{routers[-1]}"} if routers else set()
    trace = outcome.trace or {}
    accepted_at = trace.get("accepted_at")
    decisions = trace.get("decisions")
    if not isinstance(accepted_at, float) or not isinstance(decisions, list):
        return found
    until = [each for each in decisions if accepted_at + each["at"] <= at]
    decode = [each for each in until if each["tier"] == DECODE]
    prefill = [each for each in until if each["tier"] == PREFILL and each["attempt"] == until[-1]["attempt"]]
    if decode:
        found.add(decode[-1]["worker"])
    if prefill and not any(time <= at for time in outcome.token_times):
        found.add(prefill[-1]["worker"])
    return found


def hits(outcome: Outcome, injected: Sequence[Injected]) -> list[Injected]:
    """The faults that hit a process which the request needed, or its client."""
    own = str(outcome.sending.number)
    during = [each for each in injected if outcome.started_at <= each.at <= outcome.ended_at]
    return [
        each
        for each in during
        if (each.target == own if each.kind in _OF_CLIENTS else each.target in workers_at(outcome, each.at))
    ]


def pauses(outcome: Outcome, injected: Sequence[Injected]) -> list[tuple[str, float]]:
    """For each kill that hit it: the kind, and the seconds until the next token."""
    found = []
    for kill in (each for each in hits(outcome, injected) if is_kill(each.kind)):
        after = next((time for time in outcome.token_times if time > kill.at), None)
        if after is not None:
            found.append((kill.kind, after - kill.at))
    return found


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Count, percentiles and maximum, in milliseconds."""
    ordered = sorted(values)
    if not ordered:
        return {"count": 0}
    found: dict[str, float] = {"count": len(ordered)}
    for percent in _PERCENTILES:
        rank = max(0, math.ceil(len(ordered) * percent / 100) - 1)
        found[f"p{percent}_ms"] = round(1000 * ordered[rank], 1)
    return found | {"max_ms": round(1000 * ordered[-1], 1)}


def summarize(
    outcomes: Sequence[Outcome],
    expected: Mapping[int, Answer],
    *,
    injected: Sequence[Injected],
    skipped: Sequence[str],
    started_at: float,
) -> dict[str, Any]:
    """Counts, distributions and failures. `expected` is by the index of the distinct request."""
    judged = [(each, *judge(each, expected[each.sending.request.index])) for each in outcomes]
    in_flight = [each for each in outcomes if any(each.started_at <= fault.at <= each.ended_at for fault in injected)]
    hit = [each for each in outcomes if hits(each, injected)]
    return {
        "requests": {
            "sent": len(outcomes),
            **Counter(status for _, status, _ in judged),
            "running_at_a_fault": len(in_flight),
            "needing_what_was_hit": len(hit),
            "attempts_given_up": sum(len(_retries(each)) for each in outcomes),
            "streams_resumed": sum(each.num_resumed for each in outcomes),
            "sent_again": sum(each.num_repeated for each in outcomes),
            "completion_tokens": sum(usage[1] for each in outcomes for usage in each.answer.usages),
        },
        "faults": {
            "injected": len(injected),
            "by_kind": dict(sorted(Counter(each.kind for each in injected).items())),
            "not_possible_then": dict(sorted(Counter(skipped).items())),
        },
        "pause_from_kill_to_next_token": _pauses_by_kind([each for one in outcomes for each in pauses(one, injected)]),
        "retry_reasons": dict(sorted(Counter(each["reason"] for one in outcomes for each in _retries(one)).items())),
        "failures": [
            _failure(outcome, status, reason, injected, started_at)
            for outcome, status, reason in judged
            if status in (WRONG, FAILED)
        ],
    }


def _pauses_by_kind(found: Sequence[tuple[str, float]]) -> dict[str, dict[str, float]]:
    kinds = sorted({kind for kind, _ in found})
    return {
        "all": distribution([seconds for _, seconds in found]),
        **{kind: distribution([seconds for each, seconds in found if each == kind]) for kind in kinds},
    }


def _retries(outcome: Outcome) -> list[dict[str, Any]]:
    retries = (outcome.trace or {}).get("retries")
    return retries if isinstance(retries, list) else []


def _failure(
    outcome: Outcome, status: str, reason: str | None, injected: Sequence[Injected], started_at: float
) -> dict[str, Any]:
    """All that is needed to understand a failure. Times are seconds since the start of the run."""
    during = [each for each in injected if outcome.started_at <= each.at <= outcome.ended_at]
    return {
        "number": outcome.sending.number,
        "request_id": outcome.request_id,
        "status": status,
        "reason": reason,
        "started_s": round(outcome.started_at - started_at, 3),
        "ended_s": round(outcome.ended_at - started_at, 3),
        "fields": {
            name: value for name, value in outcome.sending.request.body.items() if name not in ("prompt", "messages")
        },
        "path": outcome.sending.request.path,
        "routers": [[round(at - started_at, 3), index] for at, index in outcome.routers],
        "faults": [[round(each.at - started_at, 3), each.kind, each.target, each.duration_s] for each in during],
        "retries": _retries(outcome),
        "state": (outcome.trace or {}).get("state"),
        "request_index": outcome.sending.request.index,
        "cache_salt": outcome.sending.cache_salt,
        "tokens_s": [round(at - started_at, 3) for at in outcome.token_times],
        "texts": {str(index): choice.texts() for index, choice in outcome.answer.choices.items()},
    }
