"""Runs a workload against a server: each request at its send time, within a limit of concurrency."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp

from pdserve.cli.bench.client import open_session, send
from pdserve.cli.bench.workload import BenchRequest, BenchResult, RequestRecord, Target


def _ignore(_: RequestRecord) -> None:
    """Default callback: does nothing."""


async def run_workload(
    target: Target,
    requests: Sequence[BenchRequest],
    arrivals_s: Sequence[float],
    *,
    max_concurrency: int | None = None,
    on_done: Callable[[RequestRecord], None] = _ignore,
) -> BenchResult:
    """Sends request *i* `arrivals_s[i]` seconds after the start, or later when `max_concurrency` are in flight.

    Arrivals ascend. `on_done` gets each record when its request has ended. Failures are recorded, not raised.
    Cancellation closes all connections. Raises `ValueError` when `arrivals_s` and `requests` differ in length.
    """
    schedule = list(zip(requests, arrivals_s, strict=True))
    slots: contextlib.AbstractAsyncContextManager[Any] = (
        contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )

    async def run_one(session: aiohttp.ClientSession, request: BenchRequest) -> RequestRecord:
        async with slots:
            record = await send(session, target, request, run_started_at=started_at)
        on_done(record)
        return record

    async with open_session(target) as session:
        started_at = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            tasks = []
            for request, arrival_s in schedule:
                if (wait_s := started_at + arrival_s - time.perf_counter()) > 0:
                    await asyncio.sleep(wait_s)
                tasks.append(group.create_task(run_one(session, request)))
        duration_s = time.perf_counter() - started_at
    return BenchResult(duration_s=duration_s, records=tuple(task.result() for task in tasks))
