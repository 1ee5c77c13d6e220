"""State in a Redis of its own, shared by all routers. It needs `noeviction`, and AOF to survive restarts."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from pdserve.base.errors import Unreadable
from pdserve.observe.metrics import GaugeSource
from pdserve.redis.store import Argument, Store, as_bytes, as_list
from router_svc.records.redis_memory import StateMemory
from router_svc.records.stream_seal import StreamSeal
from router_svc.state.state_store import (
    CLAIM_S,
    DELETED_TTL_S,
    EVENTS_TTL_S,
    MAX_RECORD_BYTES,
    EventBatch,
    Stage,
    group_of,
    require_size,
)

#: Goes behind the cluster's own prefix, so that keys of several clusters in one Redis stay apart.
SUFFIX = "state"
#: Batches of events that are read at once.
_BATCHES = 64
_SEPARATOR = b"\n\n"

#: KEYS: record, open records, claim, the group's list, deletion. ARGV: record, key, holder, milliseconds of a claim,
#: milliseconds of the record, whether it is listed, whether it may have been stored before.
_CREATE = """
if redis.call('EXISTS', KEYS[1]) == 1 and (ARGV[3] ~= '' or redis.call('SISMEMBER', KEYS[2], ARGV[2]) == 1) then
  return 0
end
if ARGV[7] == '1' and redis.call('EXISTS', KEYS[5]) == 1 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[5])
if ARGV[3] ~= '' then
  redis.call('SADD', KEYS[2], ARGV[2])
  redis.call('SET', KEYS[3], ARGV[3], 'PX', ARGV[4])
end
if ARGV[6] == '1' then
  redis.call('ZADD', KEYS[4], 0, ARGV[2])
  redis.call('PEXPIRE', KEYS[4], ARGV[5] * 2)
end
return 1
"""
#: The same as for `_CREATE`, but the sixth argument says whether the record stays open.
_UPDATE = """
if redis.call('GET', KEYS[3]) ~= ARGV[3] or redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[5])
redis.call('PEXPIRE', KEYS[4], ARGV[5] * 2)
if ARGV[6] == '0' then
  redis.call('SREM', KEYS[2], ARGV[2])
  redis.call('DEL', KEYS[3])
end
return 1
"""
#: KEYS: record, open records, claim. ARGV: key.
_STAGE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 0 then return 1 end
return 3 - redis.call('EXISTS', KEYS[3])
"""
#: KEYS: record, open records, claim, the group's list, deletion, events. ARGV: key, milliseconds for which the deletion
#: is known.
_DELETE = """
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[4], ARGV[1])
redis.call('DEL', KEYS[3], KEYS[6])
if ARGV[2] ~= '0' then redis.call('SET', KEYS[5], '1', 'PX', ARGV[2]) end
return redis.call('DEL', KEYS[1])
"""
#: KEYS: record, open records, claim. ARGV: key, holder, milliseconds.
_CLAIM = """
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 0 then return 0 end
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('SREM', KEYS[2], ARGV[1])
  return 0
end
local holder = redis.call('GET', KEYS[3])
if holder and holder ~= ARGV[2] then return 0 end
redis.call('SET', KEYS[3], ARGV[2], 'PX', ARGV[3])
return 1
"""
#: KEYS: claim. ARGV: holder.
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
#: KEYS: open records. ARGV: start of the names of claims, and of records. Few records are open at any time. Those that
#: have expired are removed.
_UNCLAIMED = """
local found = {}
for _, key in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('EXISTS', ARGV[2] .. key) == 0 then redis.call('SREM', KEYS[1], key)
  elseif redis.call('EXISTS', ARGV[1] .. key) == 0 then found[#found + 1] = key end
end
return found
"""
#: KEYS: the group's list. ARGV: start of the names of records. Groups are small. Records that have expired are removed.
_LISTED = """
local found = {}
for _, key in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if redis.call('EXISTS', ARGV[1] .. key) == 1 then found[#found + 1] = key
  else redis.call('ZREM', KEYS[1], key) end
end
return found
"""
#: KEYS: events, record. ARGV: first and last number, the events, milliseconds.
_APPEND = """
if redis.call('EXISTS', KEYS[2]) == 0 then return 0 end
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if last[1] and tonumber(string.match(last[1][1], '^%d+')) > tonumber(ARGV[2]) then return 0 end
redis.call('XADD', KEYS[1], (ARGV[2] + 1) .. '-0', 'first', ARGV[1], 'events', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
"""


class RedisState:
    """A `StateStore`."""

    def __init__(self, store: Store, *, ttl_s: float, seal: StreamSeal) -> None:
        """`store`: with keys of its own. `ttl_s`: time for which a record is kept after its last change.

        `seal`: for events. Records are sealed by those who store them.
        """
        self._store = store
        self._seal = seal
        self._ttl_ms = int(ttl_s * 1000)
        self._memory = StateMemory(store)

    def gauges(self) -> Sequence[GaugeSource]:
        """Its memory."""
        return self._memory.gauges()

    async def run(self) -> None:
        """Measures the memory, until cancelled. Redis expires by itself."""
        await self._memory.run()

    async def require_writable(self) -> None:
        """Writes something small, which a full Redis refuses. Raises `StoreError`."""
        await self._store.call("SET", self._store.key("probe"), "1", "PX", _ms(1.0))

    async def create(
        self, key: str, record: bytes, *, holder: str = "", is_listed: bool = False, is_again: bool = False
    ) -> bool:
        """Stores a record, which is new and open with a `holder`. Raises `TooLarge` and `StoreError`."""
        require_size(record)
        arguments: list[Argument] = [record, key, holder, _ms(CLAIM_S), self._ttl_ms, int(is_listed), int(is_again)]
        return await self._store.script(_CREATE, keys=self._keys(key), arguments=arguments) == 1

    async def read(self, key: str) -> bytes | None:
        """The record. Raises `StoreError`."""
        found = await self._store.call("GET", self._keys(key)[0])
        return None if found is None else as_bytes(found)

    async def update(self, key: str, record: bytes, holder: str, *, is_open: bool) -> bool:
        """Changes an open record. Raises `TooLarge` and `StoreError`."""
        require_size(record)
        arguments: list[Argument] = [record, key, holder, _ms(CLAIM_S), self._ttl_ms, int(is_open)]
        return await self._store.script(_UPDATE, keys=self._keys(key), arguments=arguments) == 1

    async def stage(self, key: str) -> Stage:
        """How far the record is. Raises `StoreError`."""
        return Stage(await self._store.script(_STAGE, keys=self._keys(key)[:3], arguments=[key]))

    async def delete(self, key: str, *, for_good: bool = False) -> bool:
        """Deletes a record. Raises `StoreError`."""
        keys = [*self._keys(key), self._events_key(key)]
        arguments: list[Argument] = [key, _ms(DELETED_TTL_S) if for_good else 0]
        return await self._store.script(_DELETE, keys=keys, arguments=arguments) == 1

    async def claim(self, key: str, holder: str) -> bool:
        """Claims an open record. Raises `StoreError`."""
        return await self._store.script(_CLAIM, keys=self._keys(key), arguments=[key, holder, _ms(CLAIM_S)]) == 1

    async def release(self, key: str, holder: str) -> None:
        """Gives a claim back. Raises `StoreError`."""
        await self._store.script(_RELEASE, keys=[self._keys(key)[2]], arguments=[holder])

    async def unclaimed(self) -> list[str]:
        """Keys of open records without a claim. Raises `StoreError`."""
        starts = [self._store.key("claim:"), self._record_key("")]
        found = await self._store.script(_UNCLAIMED, keys=[self._store.key("open")], arguments=starts)
        return [as_bytes(key).decode(errors="replace") for key in as_list(found)]

    async def listed(self, group: str) -> list[str]:
        """Keys of listed records. Raises `StoreError`."""
        found = await self._store.script(_LISTED, keys=[self._list_key(group)], arguments=[self._record_key("")])
        return [as_bytes(key).decode(errors="replace") for key in as_list(found)]

    async def append(self, key: str, batch: EventBatch) -> None:
        """Adds events. Raises `StoreError`."""
        packed = zlib.compress(b"".join(event + _SEPARATOR for event in batch.events), 1)
        sealed = self._seal.seal(packed, key, batch.first)
        arguments: list[Argument] = [batch.first, batch.last, sealed, _ms(EVENTS_TTL_S)]
        keys = [self._events_key(key), self._record_key(key)]
        await self._store.script(_APPEND, keys=keys, arguments=arguments)

    async def events(self, key: str, after: int, *, wait_s: float) -> list[EventBatch]:
        """Events behind `after`. Raises `StoreError`."""
        command = ("XREAD", "COUNT", _BATCHES, "BLOCK", max(1, _ms(wait_s)), "STREAMS")
        reply = await self._store.call(*command, self._events_key(key), f"{after + 1}-0", block_s=wait_s)
        batches = []
        for stream in [] if reply is None else as_list(reply):
            _, entries = as_list(stream)
            for entry in as_list(entries):
                _, fields = as_list(entry)
                _, first, _, sealed = map(as_bytes, as_list(fields))
                batches.append(self._opened(key, first, sealed).behind(after))
        return batches

    def _opened(self, key: str, first: bytes, sealed: bytes) -> EventBatch:
        try:
            packed = self._seal.open(sealed, key, int(first))
            events = zlib.decompressobj().decompress(packed, MAX_RECORD_BYTES).split(_SEPARATOR)[:-1]
            return EventBatch(first=int(first), events=events)
        except (ValueError, zlib.error) as error:
            raise Unreadable(f"Events in the state's Redis cannot be read: {error!r:.200}.") from error

    def _keys(self, key: str) -> list[str]:
        """The keys of the record, of the open records, of the claim, of the group's list, and of the deletion."""
        claim, group = self._store.key(f"claim:{key}"), self._list_key(group_of(key))
        return [self._record_key(key), self._store.key("open"), claim, group, self._store.key(f"deleted:{key}")]

    def _record_key(self, key: str) -> str:
        return self._store.key(f"response:{key}")

    def _list_key(self, group: str) -> str:
        return self._store.key(f"list:{group}")

    def _events_key(self, key: str) -> str:
        return self._store.key(f"events:{key}")


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
