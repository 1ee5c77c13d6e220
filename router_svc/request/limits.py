"""What a client may use, and how much of it is left: token buckets as values. Pure.

A bucket holds what a minute allows and fills again steadily. A request needs its whole size in it, or a full bucket
where it is larger; it may leave a debt, which is paid before the next one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Literal

Period = Literal["day", "month", "total"]

_MINUTE_S = 60.0
#: Completion tokens that a request reserves at most. Chats may ask for the whole context and use little of it.
MAX_RESERVED_COMPLETION = 1024
#: Time after which another request may have ended, or a budget may have been raised.
_PARALLEL_RETRY_S = 1.0
_TOTAL_RETRY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one key. 0: none."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    #: Requests at a time.
    parallel: int = 0
    #: Tokens within a period, prompts and completions.
    budget: int = 0
    budget_period: Period = "month"

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return any((self.requests_per_minute, self.tokens_per_minute, self.parallel, self.budget))


class Limit(StrEnum):
    """The limit that refuses a request."""

    PARALLEL = "parallel"
    REQUESTS = "requests_per_minute"
    TOKENS = "tokens_per_minute"
    BUDGET = "budget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """What was left at `at`, in seconds. Negative tokens are a debt."""

    requests: float
    tokens: float
    budget: float
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of a request: `refused_by` is None if it may run, and `bucket` is what is left then."""

    bucket: Bucket
    refused_by: Limit | None = None
    wait_s: float = 0.0


def full(limits: Limits, now: float) -> Bucket:
    """The bucket of a key that has not been used."""
    return Bucket(
        requests=limits.requests_per_minute, tokens=limits.tokens_per_minute, budget=float(limits.budget), at=now
    )


def refilled(bucket: Bucket, limits: Limits, now: float) -> Bucket:
    """The bucket at `now`. A clock that went back adds nothing."""
    minutes = max(now - bucket.at, 0.0) / _MINUTE_S
    requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
    return replace(
        bucket,
        requests=min(bucket.requests + minutes * requests, requests),
        tokens=min(bucket.tokens + minutes * tokens, tokens),
        budget=min(bucket.budget, limits.budget),
        at=now,
    )


def reserve(bucket: Bucket, limits: Limits, tokens: int, running: int, now: float) -> Verdict:
    """A request of that many tokens, while `running` others of the key have not ended."""
    bucket = refilled(bucket, limits, now)
    if limits.parallel and running >= limits.parallel:
        return Verdict(bucket=bucket, refused_by=Limit.PARALLEL, wait_s=_PARALLEL_RETRY_S)
    if limits.requests_per_minute and bucket.requests < 1:
        wait_s = (1 - bucket.requests) * _MINUTE_S / limits.requests_per_minute
        return Verdict(bucket=bucket, refused_by=Limit.REQUESTS, wait_s=wait_s)
    missing = min(tokens, limits.tokens_per_minute) - bucket.tokens
    if limits.tokens_per_minute and missing > 0:
        return Verdict(bucket=bucket, refused_by=Limit.TOKENS, wait_s=missing * _MINUTE_S / limits.tokens_per_minute)
    if limits.budget and bucket.budget <= 0:
        return Verdict(bucket=bucket, refused_by=Limit.BUDGET, wait_s=_TOTAL_RETRY_S)
    return Verdict(
        bucket=replace(
            bucket,
            requests=bucket.requests - bool(limits.requests_per_minute),
            tokens=bucket.tokens - (tokens if limits.tokens_per_minute else 0),
            budget=bucket.budget - (tokens if limits.budget else 0),
        )
    )


def settled(bucket: Bucket, limits: Limits, reserved: int, used: int) -> Bucket:
    """The bucket once a request has used so many of the tokens that were reserved for it."""
    back = reserved - used
    return replace(
        bucket,
        tokens=min(bucket.tokens + back, limits.tokens_per_minute) if limits.tokens_per_minute else bucket.tokens,
        budget=min(bucket.budget + back, limits.budget) if limits.budget else bucket.budget,
    )


def size(prompt_tokens: int, completion_tokens: int) -> int:
    """Tokens that a request reserves. `completion_tokens`: what it may generate."""
    return prompt_tokens + min(completion_tokens, MAX_RESERVED_COMPLETION)


def period_starts(period: Period, now: float) -> list[int]:
    """Starts of the periods around `now` in Unix time, in UTC: the last, this one and the next two."""
    if period == "total":
        return [0]
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "day":
        return [int((today + timedelta(days=days)).timestamp()) for days in (-1, 0, 1, 2)]
    months = [today.year * 12 + today.month - 1 + offset for offset in (-1, 0, 1, 2)]
    return [int(datetime(month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp()) for month in months]


def rate_headers(bucket: Bucket, limits: Limits) -> dict[str, str]:
    """The headers that say what is left, as OpenAI names them. Only limits that the key has get headers."""
    headers: dict[str, str] = {}
    pairs = (
        ("requests", limits.requests_per_minute, bucket.requests),
        ("tokens", limits.tokens_per_minute, bucket.tokens),
    )
    for name, limit, left in pairs:
        if limit:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(math.floor(left), 0))
            headers[f"x-ratelimit-reset-{name}"] = duration((limit - left) * _MINUTE_S / limit)
    return headers


def duration(seconds: float) -> str:
    """A duration as OpenAI writes it: `6m0s`, `1s` or `20ms`."""
    milliseconds = math.ceil(max(seconds, 0.0) * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(math.ceil(milliseconds / 1000), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
