"""`GET /v1/usage`: what tenants have used, by day and key, as JSON or CSV."""

from __future__ import annotations

import asyncio
import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, timedelta
from operator import itemgetter
from typing import Literal

from aiohttp import web

# Python 3.11 has one that pydantic cannot read.
from typing_extensions import TypedDict

from pdserve.base.errors import Overloaded, RequestError
from router_svc.api.authentication import client_of, scope_of
from router_svc.api.json_pieces import to_json
from router_svc.records.usage import UsageRow
from router_svc.records.usage_store import RETENTION_DAYS, UsageStore

CSV = "text/csv"
#: Days of an answer when the request does not say from which.
DEFAULT_DAYS = 30
PARAMETERS = ("from", "to", "format")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
#: Open requests of one tenant. The requests of all tenants read one after the other, so none of them waits for long.
_MAX_OPEN = 2
_RETRY_S = 1.0


class UsageEntry(TypedDict):
    """What a key has used on a day of UTC. Cached tokens are part of the input tokens."""

    date: str
    tenant: str
    key: str
    model: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


# `from` is no name of Python.
UsageReport = TypedDict("UsageReport", {"from": str, "to": str, "data": list[UsageEntry]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The days and the form of an answer. Both days are part of it."""

    first: date
    last: date
    format: Literal["json", "csv"]


class UsageApi:
    """The endpoint. Tenants read their own usage, admins that of all."""

    def __init__(self, usage: UsageStore) -> None:
        self._usage = usage
        #: Requests by tenant. A tenant without any has no entry.
        self._open: Counter[str] = Counter()
        self._reading = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        """The endpoint for the application."""
        return [web.get("/v1/usage", self._answer)]

    async def _answer(self, request: web.Request) -> web.Response:
        span = parse_span([*request.query.items()], self._usage.today())
        client = client_of(request)
        with self._counted(client.tenant or client.id):
            async with self._reading:
                await self._usage.flush()
                rows = await self._usage.read(span.first, span.last, scope_of(request))
                # Sorting and writing 20,000 rows takes some 70 ms.
                body = await asyncio.to_thread(render, span, rows)
        return web.Response(
            body=body, content_type="application/json" if span.format == "json" else CSV, charset="utf-8"
        )

    @contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        """Counts an open request of a tenant. Raises `Overloaded` for too many, so that no tenant keeps others out."""
        if self._open[tenant] >= _MAX_OPEN:
            raise Overloaded(
                f"{self._open[tenant]} requests for usage of the tenant {tenant} are open, which is the limit. "
                "Retry in a second.",
                retry_after_s=_RETRY_S,
            )
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]


def parse_span(query: Iterable[tuple[str, str]], today: date) -> Span:
    """What a query asks for. Raises `RequestError`."""
    given: dict[str, str] = {}
    for name, value in query:
        if name not in PARAMETERS:
            raise RequestError(
                f"The parameter {name[:50]!r} is unknown. `/v1/usage` takes {', '.join(PARAMETERS)}.", param=name[:50]
            )
        if name in given:
            raise RequestError(f"`{name}` is given twice. Send it once.", param=name)
        given[name] = value
    last = _day("to", given["to"]) if "to" in given else today
    if "from" in given:
        first = _day("from", given["from"])
    else:
        first = last - timedelta(days=min(DEFAULT_DAYS - 1, (last - date.min).days))
    if first > last:
        raise RequestError(f"`from` is {first}, which is after `to`, {last}. Send an earlier day.", param="from")
    days = (last - first).days + 1
    if days > RETENTION_DAYS:
        raise RequestError(
            f"`from` {first} to {last} are {days} days; the limit is {RETENTION_DAYS}. Ask for fewer.", param="from"
        )
    match given.get("format", "json"):
        case "json" | "csv" as form:
            return Span(first=first, last=last, format=form)
        case other:
            raise RequestError(f"`format` is {other[:20]!r}; it must be `json` or `csv`.", param="format")


def _day(name: str, text: str) -> date:
    try:
        if _DAY.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        # Such as the 30th of February.
        pass
    raise RequestError(f"`{name}` is {text[:20]!r}; it must be a day such as 2026-11-23.", param=name)


def render(span: Span, rows: Iterable[UsageRow]) -> bytes:
    """The answer's body, sorted by day, tenant, key and model. May take long: call it in a thread."""
    entries = sorted(map(_entry, rows), key=itemgetter("date", "tenant", "key", "model"))
    if span.format == "json":
        report: UsageReport = {"from": span.first.isoformat(), "to": span.last.isoformat(), "data": entries}
        return to_json(report)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*UsageEntry.__annotations__])
    writer.writeheader()
    writer.writerows(entries)
    return text.getvalue().encode()


def _entry(row: UsageRow) -> UsageEntry:
    return {
        "date": row.day,
        "tenant": row.account.tenant,
        "key": row.account.key_id,
        "model": row.account.model,
        "requests": row.usage.requests,
        "input_tokens": row.usage.input_tokens,
        "cached_tokens": row.usage.cached_tokens,
        "output_tokens": row.usage.output_tokens,
    }
