"""The lag of the event loop is seen in its histogram."""

from __future__ import annotations

import asyncio
import contextlib
import time

from prometheus_client import CollectorRegistry

from router_svc.records.loop_lag import SAMPLE_INTERVAL_S, LoopLag


def _late(registry: CollectorRegistry, seconds: str) -> float:
    total = registry.get_sample_value("pdserve_event_loop_lag_seconds_bucket", {"model_name": "m", "le": "+Inf"})
    in_time = registry.get_sample_value("pdserve_event_loop_lag_seconds_bucket", {"model_name": "m", "le": seconds})
    assert total is not None
    assert in_time is not None
    return total - in_time


async def test_a_callback_that_holds_the_loop_is_counted_as_lag() -> None:
    registry = CollectorRegistry()
    lag = asyncio.create_task(LoopLag(registry, {"model_name": "m"}).run())
    await asyncio.sleep(0)
    time.sleep(SAMPLE_INTERVAL_S + 0.11)  # noqa: ASYNC251 - holds the loop on purpose
    await asyncio.sleep(0.001)
    lag.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await lag
    assert _late(registry, "0.1") >= 1
