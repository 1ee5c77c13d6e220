"""Work on texts waits in a bounded queue, and long work leaves a thread to short work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from pdserve.base.errors import Overloaded
from router_svc.api.text_threads import INLINE_CHARACTERS, TextThreads
from tests.support.deadline import DEADLINE_S


@pytest.fixture
async def threads() -> AsyncIterator[TextThreads]:
    opened = TextThreads(max_waiting_characters=1_000_000)
    yield opened
    opened.close()


async def test_text_beyond_the_limit_is_refused_with_a_time_and_accepted_when_the_queue_is_empty(
    threads: TextThreads,
) -> None:
    """Finding 4. Fails without the limit on waiting characters of `TextThreads.run`."""
    go_on = threading.Event()
    running = asyncio.create_task(threads.run(900_000, go_on.wait))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=r"900000 characters .* this one has 200000 .limit 1000000") as refusal:
        await threads.run(200_000, lambda: None)
    assert refusal.value.retry_after_s >= 0.9
    assert threads.refused == 1
    go_on.set()
    assert await running
    # However large, it is accepted where nothing waits: its own size is bounded by the body.
    assert await threads.run(5_000_000, lambda: "done") == "done"


async def test_two_long_texts_leave_a_thread_to_short_ones(threads: TextThreads) -> None:
    """Finding 4. Fails without the semaphore for long texts of `TextThreads.run`."""
    go_on = threading.Event()
    long = [asyncio.create_task(threads.run(200_000, go_on.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        assert await threads.run(INLINE_CHARACTERS + 1, lambda: "short") == "short"
    assert not any(task.done() for task in long)
    go_on.set()
    await asyncio.gather(*long)
    assert threads.waiting_characters == 0


async def test_work_whose_client_has_left_counts_until_its_thread_is_free(threads: TextThreads) -> None:
    go_on = threading.Event()
    started = asyncio.Event()
    loop = asyncio.get_running_loop()

    def work() -> None:
        loop.call_soon_threadsafe(started.set)
        go_on.wait()

    left = asyncio.create_task(threads.run(900_000, work))
    await started.wait()
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    with pytest.raises(Overloaded):
        await threads.run(200_000, lambda: None)
    go_on.set()
    # Long texts share a thread, so this one ends after that thread is free and has said so.
    await threads.run(100_001 - 1, lambda: None)
    assert await threads.run(100_000, lambda: 1) == 1
