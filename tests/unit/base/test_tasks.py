"""A service's task group ends as a whole, with the error that caused it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from contextlib import nullcontext
from itertools import pairwise

import pytest

from pdserve.base.tasks import ServiceGroup, freed_in_turns, run_to_completion, service_group, taken_unless
from tests.support.deadline import DEADLINE_S


async def _forever(cancelled: list[str], name: str) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        cancelled.append(name)


async def test_leaving_the_block_cancels_and_awaits_every_task() -> None:
    cancelled: list[str] = []
    async with asyncio.timeout(DEADLINE_S), service_group() as group:
        for name in ("a", "b"):
            group.start(_forever(cancelled, name), name=name)
        await asyncio.sleep(0)
    assert sorted(cancelled) == ["a", "b"]


async def test_a_failing_task_ends_the_group_with_its_own_error() -> None:
    async def fail() -> None:
        raise ValueError("broken")

    cancelled: list[str] = []
    with pytest.raises(ValueError, match="broken"):
        async with asyncio.timeout(DEADLINE_S), service_group() as group:
            group.start(_forever(cancelled, "a"), name="a")
            await asyncio.sleep(0)
            group.start(fail(), name="fail")
            await asyncio.Event().wait()
    assert cancelled == ["a"]


async def test_cancelling_the_owner_cancels_the_tasks_and_stays_a_cancellation() -> None:
    cancelled: list[str] = []
    started = asyncio.Event()

    async def owner() -> None:
        async with service_group() as group:
            group.start(_forever(cancelled, "a"), name="a")
            await asyncio.sleep(0)
            started.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(owner())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == ["a"]


async def test_stop_ends_a_group_while_its_owner_waits() -> None:
    async def stop_soon(group: ServiceGroup) -> None:
        group.stop()
        group.stop()

    async with asyncio.timeout(DEADLINE_S), service_group() as group:
        group.start(stop_soon(group), name="stopper")
        await asyncio.Event().wait()


@pytest.mark.parametrize("end", ["left", "stopped", "task fails", "owner fails"])
async def test_an_ending_group_reports_that_and_starts_nothing(end: str) -> None:
    ran: list[bool] = []

    async def look(group: ServiceGroup) -> None:
        assert not group.stopping
        try:
            await asyncio.Event().wait()
        finally:
            assert group.stopping
            # No error is raised later and no coroutine is left behind: warnings are errors.
            with pytest.raises(RuntimeError, match="shutting down"):
                group.start(run(), name="late")

    async def run() -> None:
        ran.append(True)

    async def fail() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken") if "fails" in end else nullcontext():
        async with asyncio.timeout(DEADLINE_S), service_group() as group:
            group.start(look(group), name="look")
            await asyncio.sleep(0)
            assert not group.stopping
            if end == "owner fails":
                raise ValueError("broken")
            if end == "task fails":
                group.start(fail(), name="fail")
            if end == "stopped":
                group.stop()
            if end != "left":
                await asyncio.Event().wait()
    assert ran == []


async def test_a_task_cancelled_before_its_first_turn_leaves_no_coroutine_behind() -> None:
    cancelled: list[str] = []
    work = _forever(cancelled, "a")
    with pytest.raises(ValueError, match="broken"):
        async with asyncio.timeout(DEADLINE_S), service_group() as group:
            task = group.start(work, name="a")
            raise ValueError("broken")
    assert (task.cancelled(), cancelled) == (True, [])
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED


async def test_a_timeout_around_a_group_that_has_ended_is_a_timeout_error() -> None:
    """Fails without `uncancel`, before Python 3.13: the group's own cancellation counted as the caller's."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as timeout:
            async with service_group() as group:
                group.start(_forever([], "a"), name="a")
            timeout.reschedule(asyncio.get_running_loop().time())
            await asyncio.Event().wait()


async def test_a_cancellation_waits_for_the_work_to_end() -> None:
    may_end, ended = asyncio.Event(), []

    async def work() -> None:
        await may_end.wait()
        ended.append(True)

    task = asyncio.create_task(run_to_completion(work()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_a_cancelled_caller_is_freed_without_a_garbage_collection() -> None:
    """Else its frames would keep what they refer to, such as the memory of a process that is gone."""
    may_end, memory = asyncio.Event(), set[int]()
    is_freed = weakref.ref(memory)

    async def use(memory: set[int]) -> None:
        await run_to_completion(may_end.wait())

    task = asyncio.create_task(use(memory))
    del memory
    await asyncio.sleep(0)
    task.cancel()
    may_end.set()
    gc.disable()
    try:
        await asyncio.wait([task])
        del task
        await asyncio.sleep(0)
        assert is_freed() is None
    finally:
        gc.enable()


async def test_uninterrupted_work_returns_its_result_or_error() -> None:
    async def fail() -> int:
        raise ValueError("no")

    assert await run_to_completion(asyncio.sleep(0, result=3)) == 3
    with pytest.raises(ValueError, match="no"):
        await run_to_completion(fail())


@pytest.mark.parametrize("error", [None, KeyError("a")])
async def test_long_lists_are_freed_a_few_items_at_a_time(error: KeyError | None) -> None:
    longer, shorter = [*range(1000)], [*range(100)]
    left: list[int] = []

    async def watch() -> None:
        while not left or left[-1] > 100:
            left.append(len(longer))
            await asyncio.sleep(0)

    watching: asyncio.Task[None] | None = None
    with pytest.raises(KeyError) if error else nullcontext():
        async with freed_in_turns(longer, shorter):
            watching = asyncio.create_task(watch())
            if error:
                raise error
    assert watching is not None
    await watching
    assert max(before - after for before, after in pairwise(left)) <= 32
    assert len(longer) <= 32
    assert not shorter


async def test_lists_of_few_items_are_left_alone() -> None:
    few = [*range(3)]
    async with freed_in_turns(few):
        pass
    assert few == [0, 1, 2]


@pytest.mark.parametrize("times", [1, 2])
async def test_what_was_taken_for_a_caller_that_is_cancelled_is_let_go(times: int) -> None:
    may_take, let_go = asyncio.Event(), list[int]()

    async def take() -> int:
        await may_take.wait()
        return 7

    taking = asyncio.create_task(taken_unless(asyncio.get_running_loop().create_future(), take(), let_go.append))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    may_take.set()
    await asyncio.sleep(0)
    for _ in range(times):
        taking.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([taking])
    await asyncio.sleep(0)
    assert let_go == [7]
