"""`LoopCalls`: order, threads, failures, and the interpreter's lock."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from pdserve.worker.serve.loop_calls import LoopCalls


@pytest.fixture(params=["eventfd", "without eventfd"])
def wake_up(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of waking the loop."""
    if request.param == "without eventfd":
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif not hasattr(os, "eventfd"):
        pytest.skip("this system has no eventfd")


@pytest.mark.usefixtures("wake_up")
async def test_calls_from_a_thread_run_on_the_loop_in_order() -> None:
    calls, seen, done = LoopCalls(), list[int](), asyncio.Event()

    def note(number: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(number)
        if number == 999:
            done.set()

    def post_all() -> None:
        for number in range(1000):
            calls.post(note, number)

    thread = threading.Thread(target=post_all)
    thread.start()
    await asyncio.wait_for(done.wait(), 20)
    thread.join()
    calls.close()
    assert seen == list(range(1000))


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="this system has no eventfd")
async def test_posting_does_not_release_the_interpreters_lock() -> None:
    calls, done, num_posted, seen = LoopCalls(), asyncio.Event(), 0, list[int]()
    usual = sys.getswitchinterval()

    def note() -> None:
        seen.append(num_posted)
        if len(seen) == 100:
            done.set()

    def post_all() -> None:
        nonlocal num_posted
        for _ in range(100):
            calls.post(note)
            num_posted += 1

    thread = threading.Thread(target=post_all)
    sys.setswitchinterval(60)  # no thread is asked for the lock: it changes hands only when it is released
    try:
        thread.start()
        await done.wait()
    finally:
        sys.setswitchinterval(usual)
        thread.join()
        calls.close()
    assert seen == [100] * 100


@pytest.mark.usefixtures("wake_up")
async def test_posted_calls_can_be_run_at_once_and_run_once() -> None:
    calls, seen = LoopCalls(), list[str]()
    calls.post(seen.append, "a")
    calls.deliver()
    assert seen == ["a"]
    calls.post(seen.append, "b")
    calls.close()
    assert seen == ["a", "b"]
    await asyncio.sleep(0)
    assert seen == ["a", "b"]


@pytest.mark.usefixtures("wake_up")
async def test_a_failing_call_is_reported_to_the_loop_and_stops_no_other() -> None:
    calls, seen, reported = LoopCalls(), list[str](), list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def fail() -> None:
        raise RuntimeError("broken")

    calls.post(fail)
    calls.post(seen.append, "after")
    calls.deliver()
    calls.close()
    assert seen == ["after"]
    assert [str(context["exception"]) for context in reported] == ["broken"]
