"""Durations of the parts of a start, for the log."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pdserve.base.logs import EventLogger


@contextmanager
def timed(log: EventLogger, event: str, **fields: object) -> Iterator[dict[str, object]]:
    """Logs the event with `seconds` when the block ends without an error. The block may add to the yielded fields."""
    started_at = time.perf_counter()
    yield fields
    log.info(event, **fields, seconds=round(time.perf_counter() - started_at, 3))


def process_age_s() -> float:
    """Seconds since this process was executed or forked, in steps of 10 ms. Source: proc(5), starttime."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as stat:
        start_ticks = int(stat.read().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
