"""Blocking calls of coroutines: results, errors, and the cancellation of what an interrupted caller waits for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import signal
import threading
from collections.abc import Iterator

import pytest

from pdserve.llm.errors import ShutDown
from pdserve.llm.loop_thread import LoopThread, _Call


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    with contextlib.suppress(ValueError):  # A test has it raised.
        thread.close()


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C as a terminal's programs have it. What a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


async def _value() -> int:
    await asyncio.sleep(0)
    return 7


async def _fail() -> None:
    raise ValueError("no")


def test_results_and_errors_reach_the_caller(loop: LoopThread) -> None:
    assert loop.call(_value()) == 7
    with pytest.raises(ValueError, match="no"):
        loop.call(_fail())


async def test_it_works_while_an_event_loop_runs(loop: LoopThread) -> None:
    assert loop.call(_value()) == 7


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_cancels_the_work_and_waits_for_its_end(loop: LoopThread) -> None:
    ended = []

    async def work() -> None:
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        loop.call(work())
    assert ended == [True]


def test_work_that_has_not_started_can_be_cancelled(loop: LoopThread) -> None:
    async def never() -> None:
        raise AssertionError

    async def cancel() -> tuple[bool, BaseException | None]:
        call = _Call(never())
        call.cancel()
        call.start()
        return call.result.done(), call.result.exception()

    done, error = loop.call(cancel())
    assert done
    assert isinstance(error, concurrent.futures.CancelledError)


def test_in_a_forked_process_it_is_refused(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.llm.loop_thread.os.getpid", lambda: 1)
    with pytest.raises(RuntimeError, match="Make another one in this process"):
        loop.call(_value())
    monkeypatch.undo()


def test_the_thread_can_end_itself_after_its_last_work(loop: LoopThread) -> None:
    ended = threading.Event()

    async def last() -> None:
        ended.set()

    async def collect_garbage() -> None:
        loop.close(last())

    # The call that closes it is one of those that it ends.
    with contextlib.suppress(ShutDown):
        loop.call(collect_garbage())
    loop.close()
    assert ended.is_set()


def test_closing_ends_the_calls_of_other_threads_before_its_last_work(loop: LoopThread) -> None:
    """Fails if a thread that waits for a result waits for ever."""
    events: list[str] = []
    has_started = threading.Event()

    async def work() -> None:
        try:
            has_started.set()
            await asyncio.Event().wait()
        finally:
            events.append("work")

    async def last() -> None:
        events.append("last")

    with concurrent.futures.ThreadPoolExecutor() as threads:
        waiting = threads.submit(loop.call, work())
        assert has_started.wait(10)
        loop.close(last())
        with pytest.raises(ShutDown, match="was shut down"):
            waiting.result(10)
    assert events == ["work", "last"]


def test_what_the_last_work_raises_is_raised_by_close(loop: LoopThread) -> None:
    with pytest.raises(ValueError, match="no"):
        loop.close(_fail())
    with pytest.raises(ValueError, match="no"):
        loop.close(_fail())
    with pytest.raises(ShutDown):
        loop.call(_value())


def test_the_thread_refuses_to_wait_for_itself(loop: LoopThread) -> None:
    async def work() -> int:
        return loop.call(_value())

    with pytest.raises(RuntimeError, match="Call it from another thread"):
        loop.call(work())


def test_close_ends_the_thread_and_may_be_repeated(loop: LoopThread) -> None:
    before = threading.active_count()
    loop.close()
    loop.close()
    assert threading.active_count() == before - 1
