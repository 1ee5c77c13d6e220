"""Lag of the event loop: how late a timer fires because callbacks held the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from prometheus_client import CollectorRegistry

from pdserve.observe.metrics import HistogramReader, TokenHistogram

#: Time between two samples. A callback that holds the loop for longer is always seen.
SAMPLE_INTERVAL_S = 0.05
#: Bounds of the histogram's buckets, in seconds.
_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class LoopLag:
    """Samples the lag of the event loop it runs on, and exports a histogram of it."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._histogram = TokenHistogram(_BOUNDS_S, labels)
        HistogramReader(
            registry, "event_loop_lag_seconds", "Time by which timers of the event loop fired late", self._histogram
        )

    async def run(self) -> None:
        """Samples until it is cancelled."""
        now = asyncio.get_running_loop().time
        while True:
            due = now() + SAMPLE_INTERVAL_S
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            self._histogram.observe(max(now() - due, 0.0))
