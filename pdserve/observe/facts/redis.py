"""Facts about the Redis that a process uses."""

from __future__ import annotations

import time
from collections.abc import Mapping

from pdserve.base.errors import StoreError
from pdserve.observe.facts.cluster import RedisFacts
from pdserve.redis.store import Store, as_bytes

_PINGS = 5


async def redis_facts(store: Store) -> RedisFacts:
    """The facts, within some round trips."""
    try:
        latency_s = min([await _ping_s(store) for _ in range(_PINGS)])
    except StoreError as error:
        return RedisFacts(address=store.address, error=str(error))
    try:
        info = parse_info(as_bytes(await store.call("INFO")))
    except StoreError:
        info = {}
    return RedisFacts(
        address=store.address,
        version=_version(info),
        latency_s=latency_s,
        used_memory_bytes=int(info.get("used_memory", "0")),
        max_memory_bytes=int(info.get("maxmemory", "0")),
        eviction=info.get("maxmemory_policy", ""),
    )


def _version(info: Mapping[str, str]) -> str:
    """The version of Redis; of a Valkey the one that it is compatible with, and its own."""
    own = f" (Valkey {info['valkey_version']})" if "valkey_version" in info else ""
    return info.get("redis_version", "") + own


async def _ping_s(store: Store) -> float:
    started = time.perf_counter()
    await store.call("PING")
    return time.perf_counter() - started


def parse_info(info: bytes) -> dict[str, str]:
    """The answer to `INFO`."""
    lines = info.decode(errors="replace").splitlines()
    return {name: value for name, found, value in (line.partition(":") for line in lines) if found}
