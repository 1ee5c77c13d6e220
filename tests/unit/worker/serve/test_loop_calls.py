"""`LoopCalls`: order, threads, failures, and the interpreter's lock."""

from __future__ import annotations

import asyncio
import os
import sys
import threading

import pytest

from pdserve.worker.serve.loop_calls import LoopCalls


@pytest.fixture(params=["eventfd", "without eventfd"])
def mailbox_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of waking the loop."""
    if request.param == "without eventfd":
        monkeypatch.delattr(os, "eventfd", raising=False)
    elif not hasattr(os, "eventfd"):
        pytest.skip("this system has no eventfd")


@pytest.mark.usefixtures("mailbox_kind")
async def test_calls_of_threads_arrive_on_the_loop_in_order() -> None:
    mailbox, seen, done = LoopCalls(), list[int](), asyncio.Event()

    def note(number: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(number)
        if number == 999:
            done.set()

    def post_all() -> None:
        for number in range(1000):
            mailbox.post(note, number)

    thread = threading.Thread(target=post_all)
    thread.start()
    await asyncio.wait_for(done.wait(), 20)
    thread.join()
    mailbox.close()
    assert seen == list(range(1000))


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="this system has no eventfd")
async def test_who_posts_does_not_lose_the_interpreters_lock() -> None:
    mailbox, done, num_posted, seen = LoopCalls(), asyncio.Event(), 0, list[int]()
    usual = sys.getswitchinterval()

    def note() -> None:
        seen.append(num_posted)
        if len(seen) == 100:
            done.set()

    def post_all() -> None:
        nonlocal num_posted
        for _ in range(100):
            mailbox.post(note)
            num_posted += 1

    thread = threading.Thread(target=post_all)
    sys.setswitchinterval(60)  # nobody is asked for the lock: only who gives it away loses it
    try:
        thread.start()
        await done.wait()
    finally:
        sys.setswitchinterval(usual)
        thread.join()
        mailbox.close()
    assert seen == [100] * 100


@pytest.mark.usefixtures("mailbox_kind")
async def test_what_was_posted_can_be_had_at_once_and_is_had_once() -> None:
    mailbox, seen = LoopCalls(), list[str]()
    mailbox.post(seen.append, "a")
    mailbox.deliver()
    assert seen == ["a"]
    mailbox.post(seen.append, "b")
    mailbox.close()
    assert seen == ["a", "b"]
    await asyncio.sleep(0)
    assert seen == ["a", "b"]


@pytest.mark.usefixtures("mailbox_kind")
async def test_a_call_that_fails_is_told_to_the_loop_and_stops_no_other() -> None:
    mailbox, seen, told = LoopCalls(), list[str](), list[dict[str, object]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))

    def fail() -> None:
        raise RuntimeError("broken")

    mailbox.post(fail)
    mailbox.post(seen.append, "after")
    mailbox.deliver()
    mailbox.close()
    assert seen == ["after"]
    assert [str(context["exception"]) for context in told] == ["broken"]
