"""Keeps usage by day in Redis, where all routers add to it.

`usage:{day}` is a hash with a field `{tenant}:{key id}:{model}` for each key that was used: requests, input, cached
and output tokens. Its fields `@{router}` have the last batch of each router: a batch whose reply was lost is not
added twice. What is kept is bounded, so that usage cannot fill Redis: beyond `MAX_DAY_ROWS` a day adds to the field
`*:*:{model}`, and beyond `MAX_KEPT_ROWS` the oldest days are deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Callable
from datetime import date, timedelta

from pdserve.base.errors import StoreError, TooLarge
from pdserve.base.logs import get_logger
from pdserve.observe.metrics import CounterSource
from pdserve.redis.store import Argument, Reply, Store, as_bytes, as_fields, as_list
from router_svc.records.usage import Account, Batch, PendingUsage, Usage, UsageRow, day_of, days_beyond

log = get_logger(__name__)

USAGE_KEY = "usage:"
RETENTION_DAYS = 400
#: Rows of an answer.
MAX_ROWS = 20_000
#: Rows of a day. A day fits into an answer, with a row for the rest of each model.
MAX_DAY_ROWS = 19_000
#: Rows of all days, 60 to 70 MB: 1,000 keys for 400 days, or 10,000 keys for 40.
MAX_KEPT_ROWS = 400_000
#: Seconds of usage that a killed router loses.
FLUSH_S = 5.0
#: Seconds between two looks at how much is kept.
_TRIM_S = 600.0
#: Rows that wait for Redis: some days of 10,000 keys.
_MAX_PENDING = 100_000
#: Rows of one script, which takes some 1 ms of Redis, and 2 ms of the event loop.
_BATCH_ROWS = 200
_PAGE_FIELDS = 200
#: Fifteen digits are exact as a number of Lua.
_VALUE = re.compile(rb"(\d{1,15}) (\d{1,15}) (\d{1,15}) (\d{1,15})")
_FIELD = re.compile(r"([A-Za-z0-9._-]{1,64}|\*):([A-Za-z0-9._-]{1,64}|\*):(.{1,1000})", re.DOTALL)

# KEYS: the day. ARGV: the router's field, sequence, TTL in s, the most rows, then field and four numbers of each row.
# Returns whether the rows were added: 0 if they had been before. Values that are no usage are replaced.
_ADD = """
local kind = redis.call('TYPE', KEYS[1]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('DEL', KEYS[1]) end
if (tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or 0) or 0) >= tonumber(ARGV[2]) then return 0 end
local rows = redis.call('HLEN', KEYS[1])
for i = 5, #ARGV, 5 do
  local field = ARGV[i]
  local had = redis.call('HGET', KEYS[1], field)
  if not had and rows >= tonumber(ARGV[4]) then
    field = string.gsub(field, '^[^:]*:[^:]*', '*:*')
    had = redis.call('HGET', KEYS[1], field)
  end
  if not had then rows, had = rows + 1, '' end
  local sums = {string.match(#had < 64 and had or '', '^(%d+) (%d+) (%d+) (%d+)$')}
  for j = 1, 4 do sums[j] = string.format('%.0f', (tonumber(sums[j]) or 0) + tonumber(ARGV[i + j])) end
  redis.call('HSET', KEYS[1], field, table.concat(sums, ' '))
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
return 1
"""


class UsageStore:
    """Usage of one router's clients: counted here, added to Redis in the background. Belongs to the event loop."""

    def __init__(
        self,
        store: Store,
        *,
        flush_s: float = FLUSH_S,
        max_pending: int = _MAX_PENDING,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """At most `max_pending` rows wait while Redis is away."""
        self._store = store
        self._flush_s = flush_s
        self._clock = clock
        self._router = f"@{secrets.token_hex(8)}"
        self._pending = PendingUsage(max_rows=max_pending)
        #: What has been sent and not been confirmed. It is sent again as it is.
        self._unconfirmed: Batch | None = None
        self._flushing = asyncio.Lock()
        self._days_dropped = 0

    def counters(self) -> tuple[CounterSource, ...]:
        """For the router's metrics."""
        return (
            CounterSource(
                name="usage_requests_dropped",
                text="Requests not counted in the usage of tenants in Redis",
                value=lambda: self._pending.dropped,
            ),
            CounterSource(
                name="usage_days_dropped",
                text="Days of usage that this router deleted from Redis, because there was too much",
                value=lambda: self._days_dropped,
            ),
        )

    def today(self) -> date:
        """The present day of UTC."""
        return date.fromisoformat(day_of(self._clock()))

    def add(self, account: Account, usage: Usage) -> None:
        """A request has ended. Never waits."""
        self._pending.add(account, usage, self._clock())

    async def run(self) -> None:
        """Adds to Redis every few seconds until cancelled, then the rest. Deletes what is too much."""
        loop = asyncio.get_running_loop()
        trim_at = loop.time()
        try:
            while True:
                await asyncio.sleep(self._flush_s)
                await self.flush()
                if loop.time() >= trim_at:
                    trim_at = loop.time() + _TRIM_S
                    await self.trim()
        finally:
            await self.flush()

    async def flush(self) -> None:
        """Adds to Redis what is not there. While Redis is away it stays here."""
        async with self._flushing:
            with contextlib.suppress(StoreError):
                while (batch := self._unconfirmed or self._pending.take(_BATCH_ROWS)) is not None:
                    self._unconfirmed = batch
                    await self._store.script(_ADD, keys=[self._key(batch.day)], arguments=self._arguments(batch))
                    self._unconfirmed = None

    async def trim(self) -> None:
        """Deletes the oldest days beyond `MAX_KEPT_ROWS`. Does nothing while Redis is away."""
        days = [(self.today() - timedelta(days=age)).isoformat() for age in range(RETENTION_DAYS + 1)]
        with contextlib.suppress(StoreError):
            sizes = await self._store.pipeline([["HLEN", self._key(day)] for day in days])
            rows = [(day, size) for day, size in zip(days, sizes, strict=True) if isinstance(size, int)]
            for day in days_beyond(rows, MAX_KEPT_ROWS):
                if await self._store.call("UNLINK", self._key(day)):
                    self._days_dropped += 1
                    log.warning("usage_day_dropped", day=day, max_rows=MAX_KEPT_ROWS)

    async def read(self, first: date, last: date, tenant: str | None) -> list[UsageRow]:
        """Usage of these days, the days in order; of one tenant, or of all.

        Raises:
            StoreError: Redis is unavailable.
            TooLarge: there is more than one answer may have.
        """
        rows: list[UsageRow] = []
        for offset in range((last - first).days + 1):
            day = (first + timedelta(days=offset)).isoformat()
            rows += await self._read_day(day, tenant, MAX_ROWS - len(rows))
        return rows

    async def _read_day(self, day: str, tenant: str | None, max_rows: int) -> list[UsageRow]:
        # A field may come twice while others are added.
        found: dict[Account, UsageRow] = {}
        cursor = b"0"
        match = [] if tenant is None else ["MATCH", f"{tenant}:*"]
        while True:
            page = await self._store.call("HSCAN", self._key(day), cursor, *match, "COUNT", _PAGE_FIELDS)
            cursor, fields = _page(page)
            for row in _rows(day, fields):
                if tenant in (None, row.account.tenant):
                    found[row.account] = row
            if len(found) > max_rows:
                raise TooLarge(
                    f"The usage of these days has more than {MAX_ROWS} rows, which is the limit of one answer. "
                    "Ask for fewer days.",
                    param="from",
                )
            if cursor == b"0":
                return [*found.values()]

    def _key(self, day: str) -> str:
        return self._store.key(USAGE_KEY + day)

    def _arguments(self, batch: Batch) -> list[Argument]:
        rows: list[Argument] = []
        for account, usage in batch.rows.items():
            rows += [f"{account.tenant}:{account.key_id}:{account.model}", *usage.values()]
        return [self._router, batch.sequence, RETENTION_DAYS * 86_400, MAX_DAY_ROWS, *rows]


def _page(reply: Reply) -> tuple[bytes, dict[str, bytes]]:
    """The next cursor and the fields of a page. Raises `StoreError`."""
    values = as_list(reply)
    if len(values) != 2:
        raise StoreError(f"Redis answered {len(values)} values where a cursor and a page were expected.")
    return as_bytes(values[0]), as_fields(values[1])


def _rows(day: str, fields: dict[str, bytes]) -> list[UsageRow]:
    """The rows among the fields. What is no usage is left out."""
    rows = []
    for name, value in fields.items():
        names, numbers = _FIELD.fullmatch(name), _VALUE.fullmatch(value)
        if names is None or numbers is None:
            continue
        requests, input_tokens, cached_tokens, output_tokens = map(int, numbers.groups())
        usage = Usage(
            requests=requests, input_tokens=input_tokens, cached_tokens=cached_tokens, output_tokens=output_tokens
        )
        tenant, key_id, model = names.groups()
        rows.append(UsageRow(day=day, account=Account(tenant=tenant, key_id=key_id, model=model), usage=usage))
    return rows
