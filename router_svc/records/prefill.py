"""Who computed the prompt of a request, why, and what the worker had cached. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from router_svc.records.event_log import EventLog
from router_svc.records.events import (
    BlocksReserved,
    Committed,
    DecodeStarted,
    Event,
    FellBack,
    FirstToken,
    Prefilled,
    PrefillProgressed,
    PrefillScored,
    WorkerChosen,
)
from router_svc.routing.local_prefill import LocalPrefillReason, PrefillPlan


@dataclass(frozen=True, slots=True)
class PromptPrefill:
    """Who has computed a prompt."""

    #: The tier: prefill or decode; None: there are no tokens yet.
    tier: str | None = None
    #: Why a decode worker computed the prompt; None: no decode worker did.
    local_reason: LocalPrefillReason | None = None


def prefill_of(log: EventLog) -> PromptPrefill:
    """Who has computed the prompt, the last time that it was computed."""
    found, planned = PromptPrefill(), LocalPrefillReason.SHORT
    for logged in log:
        match logged.event:
            case WorkerChosen(plan=plan) if plan is not None:
                planned = plan.reason
            case FellBack():
                planned = LocalPrefillReason.FALLBACK
            case PrefillScored():
                found = PromptPrefill("prefill", found.local_reason)
            case Prefilled():
                found = PromptPrefill("prefill")
            case DecodeStarted(is_prefilled_locally=True):
                found = PromptPrefill("decode", planned)
    return found


def cached_tokens_of(log: EventLog) -> int | None:
    """Prompt tokens that the worker had cached; None: no worker has computed yet.

    The client pays for the prompt as it was computed for the first token, whatever is computed again later.
    """
    found: int | None = None
    for logged in log:
        match logged.event:
            case FirstToken() | PrefillScored():
                break
            case PrefillProgressed(cached_tokens=cached) | Prefilled(cached_tokens=cached):
                found = cached
            case DecodeStarted(is_prefilled_locally=True, cached_tokens=cached):
                found = cached
    return found


def implied_fallback(log: EventLog, event: Event, prompt_tokens: int) -> FellBack | None:
    """The fallback that an event after those in `log` shows or plans; None: there is none."""
    match event:
        case WorkerChosen(plan=plan) if plan is not None and plan.fallback:
            return FellBack(reason=plan.fallback, worker=event.worker)
        case DecodeStarted(is_prefilled_locally=True):
            plan, uncached = _present_plan(log), prompt_tokens - event.cached_tokens
            if plan is not None and plan.reason is LocalPrefillReason.SHORT and uncached > plan.threshold:
                return FellBack(reason="not_receivable", worker=event.worker)
    return None


def _present_plan(log: EventLog) -> PrefillPlan | None:
    """The plan of the latest choice of a decode worker; None: there was a fallback since."""
    for logged in reversed(log):
        match logged.event:
            case FellBack():
                return None
            case WorkerChosen(plan=plan) if plan is not None:
                return plan
    return None


def reported_of(log: EventLog) -> dict[str, float]:
    """What workers have measured, the latest of each measurement."""
    found: dict[str, float] = {}
    for logged in log:
        match logged.event:
            case BlocksReserved(reserve_s=reserve_s):
                found["reserve_s"] = reserve_s
            case DecodeStarted(queue_s=queue_s):
                found["decode_queue_s"] = queue_s
            case Committed(reported=reported):
                found |= reported
    return found
