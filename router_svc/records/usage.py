"""What tenants use: tokens of requests that have ended, summed by day and key, and in all by tenant. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from datetime import UTC, datetime

from router_svc.records.milestones import Milestone
from router_svc.records.record import Record
from router_svc.records.request_state import RequestState

#: Tenants with a series of their own. The others share one.
MAX_LABELS = 100
OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Requests, and their tokens. `cached_tokens` are part of `input_tokens`."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )

    def __sub__(self, other: Usage) -> Usage:
        return Usage(
            requests=self.requests - other.requests,
            input_tokens=self.input_tokens - other.input_tokens,
            cached_tokens=self.cached_tokens - other.cached_tokens,
            output_tokens=self.output_tokens - other.output_tokens,
        )

    def values(self) -> tuple[int, int, int, int]:
        """The numbers in the order of the fields."""
        return astuple(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Whose usage it is. Names of tenants and keys have no colon; that of a model may have any character.

    Usage beyond the rows of a day is counted for the tenant `*` and the key `*`. No tenant or key has this name.
    """

    tenant: str
    key_id: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageRow:
    """What an account has used on one day of UTC, such as `2026-11-23`."""

    day: str
    account: Account
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of one day on their way to Redis. `sequence` tells whether they have arrived there."""

    sequence: int
    day: str
    rows: Mapping[Account, Usage]


def usage_of(record: Record) -> Usage:
    """What a prompt has cost its client: nothing before its prefill, and each token once, whatever was retried."""
    if not _prefill_has_started(record):
        return Usage()
    return Usage(
        input_tokens=record.prompt_tokens,
        cached_tokens=min(record.cached_tokens, record.prompt_tokens),
        output_tokens=record.completion_tokens,
    )


def tokens_charged(record: Record) -> int:
    """Tokens that count for the limits of the client's key.

    They are the tokens of its usage. A client that leaves before there is any pays for its prompt once a worker was
    chosen: the worker may be computing it, since it reports a step at its end. Otherwise leaving early would make
    prefill free.
    """
    usage = usage_of(record)
    if usage == Usage() and record.state is RequestState.CANCELLED and record.decisions:
        return record.prompt_tokens
    return usage.input_tokens + usage.output_tokens


def _prefill_has_started(record: Record) -> bool:
    """Whether a worker has reported that it computes the prompt, or another router has had tokens of it."""
    return (
        record.completion_tokens > 0 or Milestone.PREFILL_START in record.milestones or record.prefill.tier is not None
    )


def day_of(now: float) -> str:
    """The day in UTC of a Unix time."""
    return datetime.fromtimestamp(now, UTC).date().isoformat()


def days_beyond(days: Iterable[tuple[str, int]], max_rows: int) -> list[str]:
    """The days, given from the latest to the oldest with their rows, that exceed `max_rows`. Never the latest."""
    beyond, rows = [], 0
    for number, (day, size) in enumerate(days):
        rows += size
        if number and size and rows > max_rows:
            beyond.append(day)
    return beyond


class PendingUsage:
    """Usage that is not in Redis yet."""

    def __init__(self, *, max_rows: int) -> None:
        self._max_rows = max_rows
        self._days: dict[str, dict[Account, Usage]] = {}
        self._num_rows = 0
        self._sequence = 0
        #: Requests that were not counted because there were too many rows.
        self.dropped = 0

    def add(self, account: Account, usage: Usage, now: float) -> None:
        """A request has ended at this Unix time."""
        rows = self._days.setdefault(day_of(now), {})
        if account not in rows:
            if self._num_rows >= self._max_rows:
                self.dropped += usage.requests
                return
            self._num_rows += 1
        rows[account] = rows.get(account, Usage()) + usage

    def take(self, max_rows: int) -> Batch | None:
        """The oldest rows, which are no longer pending; None: there are none."""
        self._days = {day: rows for day, rows in self._days.items() if rows}
        if not self._days:
            return None
        day, rows = min(self._days.items())
        taken = {account: rows.pop(account) for account in [*rows][:max_rows]}
        self._num_rows -= len(taken)
        self._sequence += 1
        return Batch(sequence=self._sequence, day=day, rows=taken)


class TenantTotals:
    """Usage by tenant since the router's start. At most `MAX_LABELS` tenants have totals of their own."""

    def __init__(self) -> None:
        #: Tenants that exist, whether or not they have used anything.
        self.known: Callable[[], Iterable[str]] = tuple
        self._totals: dict[str, Usage] = {}
        self._rest = Usage()

    def add(self, tenant: str, usage: Usage) -> None:
        """A request of a tenant has ended."""
        self._label([tenant])
        if tenant in self._totals:
            self._totals[tenant] += usage
        else:
            self._rest += usage

    def by_label(self) -> Mapping[str, Usage]:
        """Totals by label. The tenants without a label of their own are `other`, once they have used something."""
        self._label(self.known())
        if self._rest == Usage():
            return self._totals
        return self._totals | {OTHER: self._totals.get(OTHER, Usage()) + self._rest}

    def _label(self, tenants: Iterable[str]) -> None:
        for tenant in tenants:
            if len(self._totals) >= MAX_LABELS:
                return
            self._totals.setdefault(tenant, Usage())
