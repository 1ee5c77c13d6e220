"""Events reach the right inbox in order, and a newer attempt replaces an older one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from pdserve.base.errors import PeerLost, StaleAttempt
from pdserve.base.ids import RequestId
from pdserve.worker.serve import inboxes as inboxes_module
from pdserve.worker.serve.inboxes import Failed, Inbox, Inboxes

A = RequestId("a")
WAIT_S = 10.0


async def test_events_come_in_order_whether_present_or_awaited() -> None:
    inbox: Inbox[str] = Inbox(A, 1)
    inbox.put("one")
    inbox.put("two")
    assert [await inbox.next(), await inbox.next(timeout_s=WAIT_S)] == ["one", "two"]
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        waiting = group.create_task(inbox.next())
        await asyncio.sleep(0)
        inbox.put("three")
    assert waiting.result() == "three"


async def test_no_event_in_time_is_none_and_loses_nothing() -> None:
    inbox: Inbox[str] = Inbox(A, 1)
    assert await inbox.next(timeout_s=0.0) is None
    inbox.put("late")
    assert await inbox.next(timeout_s=WAIT_S) == "late"


async def test_a_failure_is_raised_when_its_turn_comes() -> None:
    inbox: Inbox[str] = Inbox(A, 1)
    inbox.put("one")
    inbox.put(Failed(error=PeerLost("gone")))
    assert await inbox.next() == "one"
    with pytest.raises(PeerLost):
        await inbox.next()


async def test_a_failure_cancels_what_is_not_to_outlast_it() -> None:
    inbox: Inbox[str] = Inbox(A, 1)
    has_started, is_cancelled = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        has_started.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_cancelled.set()

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        waiting = group.create_task(_error_of(inbox, work()))
        await has_started.wait()
        inbox.put("does not matter")
        inbox.put(Failed(error=PeerLost("first")))
        inbox.put(Failed(error=PeerLost("second")))
    assert str(waiting.result()) == "first"
    assert is_cancelled.is_set()
    assert str(await _error_of(inbox, asyncio.Event().wait())) == "first", "it has come already"


async def _error_of(inbox: Inbox[str], work: Coroutine[Any, Any, object]) -> PeerLost:
    with pytest.raises(PeerLost) as raised:
        await inbox.unless_failed(work)
    return raised.value


async def test_what_ends_before_a_failure_has_its_own_result_and_its_own_errors() -> None:
    inbox: Inbox[str] = Inbox(A, 1)
    assert await inbox.unless_failed(asyncio.sleep(0, result=5)) == 5
    with pytest.raises(TimeoutError):
        await inbox.unless_failed(asyncio.wait_for(asyncio.Event().wait(), 0))
    inbox.put(Failed(error=PeerLost("later")))
    with pytest.raises(PeerLost):
        await inbox.next(timeout_s=WAIT_S)


async def test_more_takes_events_up_to_the_first_of_another_kind() -> None:
    inbox: Inbox[str | int] = Inbox(A, 1)
    for event in (1, 2, "other", 3):
        inbox.put(event)
    assert list(inbox.more(int)) == [1, 2]
    assert list(inbox.more(int)) == []
    assert await inbox.next() == "other"
    assert list(inbox.more(int)) == [3]
    assert list(inbox.more(int)) == []


async def test_a_newer_attempt_takes_over_and_an_older_one_is_refused() -> None:
    inboxes: Inboxes[str] = Inboxes()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        opened = asyncio.Event()

        async def older() -> None:
            async with inboxes.open(A, 1) as inbox:
                opened.set()
                with pytest.raises(StaleAttempt):
                    await inbox.next()

        group.create_task(older())
        await opened.wait()
        async with inboxes.open(A, 2) as newer:
            with pytest.raises(StaleAttempt):
                async with inboxes.open(A, 2):
                    raise AssertionError("the same attempt was opened twice")
            inboxes.put(A, 2, "for the newer one")
            assert await newer.next() == "for the newer one"
    inboxes.put(A, 2, "dropped: the request has left")
    async with inboxes.open(A, 1) as reopened:
        assert await reopened.next(timeout_s=0.0) is None


async def test_an_event_of_another_attempt_is_dropped_and_counted() -> None:
    stale: list[tuple[str, StaleAttempt]] = []
    inboxes: Inboxes[str] = Inboxes(lambda kind, error: stale.append((kind, error)))
    async with inboxes.open(A, 2) as inbox:
        inboxes.put(A, 1, "of the older one, whose end was not waited for")
        inboxes.put(A, 1, Failed(error=PeerLost("gone")))
        assert await inbox.next(timeout_s=0.0) is None
        assert [kind for kind, _ in stale] == ["event", "event"]
        inboxes.put(A, 2, "its own")
        assert await inbox.next() == "its own"


async def test_a_newer_attempt_reports_while_it_waits_for_the_older_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inboxes_module, "_MEANWHILE_S", 0.001)
    inboxes: Inboxes[str] = Inboxes()
    reports = 0
    older = inboxes.open(A, 1)
    await older.__aenter__()

    async def report() -> None:
        nonlocal reports
        reports += 1
        if reports == 3:
            await older.__aexit__(None, None, None)

    async with asyncio.timeout(WAIT_S), inboxes.open(A, 2, meanwhile=report) as newer:
        assert newer.attempt == 2
    assert reports == 3
