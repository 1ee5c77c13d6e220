"""Answers about limits: the reply of Redis, and the error for a client whose key has reached a limit."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.base.errors import QuotaExceeded, RateLimited, StoreError
from pdserve.redis.store import Reply, as_bytes, as_list
from router_svc.request.client import Client
from router_svc.request.limits import Bucket, Limit, Limits, Verdict, full


def verdict_of(reply: Reply, now: float) -> tuple[Verdict, str]:
    """The script's answer. Raises `StoreError`."""
    fields: Sequence[str] = [as_bytes(item).decode(errors="replace") for item in as_list(reply)]
    try:
        reason, wait_ms, requests, tokens, budget, period = fields
        bucket = Bucket(requests=float(requests), tokens=float(tokens), budget=float(budget), at=now)
        refused_by = Limit(reason) if reason else None
        return Verdict(bucket=bucket, refused_by=refused_by, wait_s=float(wait_ms) / 1000), period
    except ValueError as error:
        raise StoreError(f"The limits in Redis cannot be parsed: {error!r:.200}.") from error


def refusal(client: Client, limits: Limits, tokens: int, verdict: Verdict) -> RateLimited:
    """The error for the client: the limit, its value, what was asked for, and what to do."""
    wait = f"Retry after {max(verdict.wait_s, 1.0):.0f} s"
    match verdict.refused_by:
        case Limit.PARALLEL:
            text = f"has {limits.parallel} requests at a time, which is its limit. {wait}, or when one has ended."
        case Limit.REQUESTS:
            text = f"has used its {limits.requests_per_minute} requests per minute. {wait}."
        case Limit.TOKENS:
            left = max(int(verdict.bucket.tokens), 0)
            text = (
                f"has {left} of its {limits.tokens_per_minute} tokens per minute left, and this request may take "
                f"{tokens}. {wait}, or send a shorter prompt or a lower `max_tokens`."
            )
        case _:
            per = "" if limits.budget_period == "total" else f" per {limits.budget_period}"
            return QuotaExceeded(
                f"The API key {client.id} has used its budget of {limits.budget} tokens{per}. Ask the operator for "
                "more, or wait for the next period.",
                retry_after_s=verdict.wait_s,
            )
    return RateLimited(f"The API key {client.id} {text}", retry_after_s=max(verdict.wait_s, 1.0))


def too_many(client: Client, limits: Limits, now: float) -> RateLimited:
    """The error for a client that resumes a request while its key has as many others running as it may."""
    return refusal(client, limits, 0, Verdict(bucket=full(limits, now), refused_by=Limit.PARALLEL, wait_s=1.0))
