"""The memory of a real Redis, as the router exports it."""

from __future__ import annotations

import pytest

from pdserve.cli.private_redis import DEFAULT_MEMORY_BYTES, PrivateRedis
from pdserve.redis.store import Store
from router_svc.records.metrics import RouterMetrics
from router_svc.records.redis_memory import RedisMemory


def exported(memory: RedisMemory) -> dict[str, float]:
    metrics = RouterMetrics(model_name="m")
    metrics.read_gauges(*memory.gauges())
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {each.name.split("_memory_")[1]: each.value for each in samples if "redis_memory" in each.name}


@pytest.mark.own_redis
async def test_what_redis_uses_and_may_use_is_exported_while_it_is_known(redis_server: PrivateRedis) -> None:
    """Fails if an old value stays, or if no limit is exported as a limit of 0."""
    async with Store(redis_server.url) as store:
        memory = RedisMemory(store)
        assert exported(memory) == {}
        await memory.measure()
        found = exported(memory)
        assert found["max_bytes"] == DEFAULT_MEMORY_BYTES
        assert 100_000 < found["used_bytes"] < DEFAULT_MEMORY_BYTES
        await store.call("CONFIG", "SET", "maxmemory", 0)
        await memory.measure()
        assert exported(memory).keys() == {"used_bytes"}
        # A user without the right to ask: everything else works.
        await store.call("ACL", "SETUSER", "default", "-info")
        await memory.measure()
        assert exported(memory) == {}
        assert store.available
