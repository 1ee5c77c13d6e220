"""Refused requests in Redis, so that a request which ended workers under one router does not end more under the next.

Redis also has the workers that have failed by themselves under equal requests: their number bounds how many workers all
routers lose together.

Redis has digests with a key that follows from the cluster secret: they reveal no prompt, and a stranger who
writes to Redis can have no other request refused. Ends are times of Redis, whatever the routers' clocks say.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

from pdserve.base.errors import StoreError
from pdserve.redis.store import Argument, Reply, Store, as_bytes, as_list
from router_svc.request.quarantine import DIGEST_BYTES, MAX_REFUSED, REFUSED_S, Quarantine

KEY = "refused"
#: Prefix of the key of a digest's hash. Its fields are the names of the workers that failed by themselves.
DEATHS_KEY = "deaths:"
#: Workers that are kept for a digest. Fewer are enough to end a request.
_MAX_DEATHS = 16
#: Interval between two exchanges. Until the next one, another router may still take a request that is refused.
_INTERVAL_S = 1.0

_NOW = "local time = redis.call('TIME') local now = time[1] * 1000 + math.floor(time[2] / 1000) "
# A key of another type is not ours: it is replaced.
_ADD = (
    _NOW
    + """
if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then redis.call('DEL', KEYS[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
)
_LIST = (
    _NOW
    + """
if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then return {} end
local found = redis.call('ZREVRANGE', KEYS[1], 0, ARGV[1] - 1, 'WITHSCORES')
for i = 2, #found, 2 do found[i] = string.format('%.0f', found[i] - now) end
return found
"""
)
# Counts workers, not requests: the step in which a worker fails may have many equal requests.
_DEATH = """
if redis.call('TYPE', KEYS[1]).ok ~= 'hash' or redis.call('HLEN', KEYS[1]) > tonumber(ARGV[4]) then
  redis.call('DEL', KEYS[1])
end
if redis.call('HLEN', KEYS[1]) < tonumber(ARGV[4]) then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
local own, alone = 0, 0
for _, was_alone in ipairs(redis.call('HVALS', KEYS[1])) do
  own = own + 1
  if was_alone == '1' then alone = alone + 1 end
end
return own .. ' ' .. alone
"""


class SharedQuarantine:
    """Exchanges the refusals of one router with the others while `run` runs. Without Redis, each router has its own."""

    def __init__(
        self,
        quarantine: Quarantine,
        store: Store,
        *,
        interval_s: float = _INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Sets `on_add` and `on_death` of the quarantine. `clock`: the clock of the quarantine."""
        self._quarantine = quarantine
        self._store = store
        self._interval_s = interval_s
        self._clock = clock
        self._unshared: deque[bytes] = deque(maxlen=MAX_REFUSED)
        self._has_new = asyncio.Event()
        quarantine.on_add = self._share
        quarantine.on_death = self._count

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            with contextlib.suppress(StoreError):  # The store logs outages.
                await self.exchange()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._has_new.wait()
            self._has_new.clear()

    async def exchange(self) -> None:
        """Writes new refusals, and reads those of all routers. Raises `StoreError`."""
        key = self._store.key(KEY)
        while self._unshared:
            arguments: list[Argument] = [self._unshared[0].hex(), int(REFUSED_S * 1000), MAX_REFUSED]
            await self._store.script(_ADD, keys=[key], arguments=arguments)
            self._unshared.popleft()
        found = as_list(await self._store.script(_LIST, keys=[key], arguments=[MAX_REFUSED]))
        pairs = zip(found[::2], found[1::2], strict=False)
        refusals = [refusal for pair in pairs if (refusal := _refusal(*pair)) is not None]
        self._quarantine.merge(refusals, self._clock())

    async def _count(self, digest: bytes, worker: str, alone: bool) -> tuple[int, int]:
        """How many workers have failed by themselves under this request, and how many of them computed nothing else."""
        arguments: list[Argument] = [worker, int(alone), int(REFUSED_S * 1000), _MAX_DEATHS]
        try:
            key = self._store.key(DEATHS_KEY + digest.hex())
            counts = as_bytes(await self._store.script(_DEATH, keys=[key], arguments=arguments))
        except StoreError:  # The store logs outages. The router's own count remains.
            return 0, 0
        own, own_alone = map(int, counts.split())
        return own, own_alone

    def _share(self, digest: bytes) -> None:
        self._unshared.append(digest)
        self._has_new.set()


def _refusal(digest: Reply, left_ms: Reply) -> tuple[bytes, float] | None:
    """The digest, and the seconds that are left; None: no router has written this."""
    try:
        name, left_s = bytes.fromhex(as_bytes(digest).decode()), int(as_bytes(left_ms)) / 1000
    except (ValueError, OverflowError):
        return None
    return (name, left_s) if len(name) == DIGEST_BYTES else None
