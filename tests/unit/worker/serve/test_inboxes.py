"""Events reach the right inbox in order, and a newer attempt replaces an older one."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.base.errors import PeerLost, StaleAttempt
from pdserve.base.ids import RequestId
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
            inboxes.put(A, "for the newer one")
            assert await newer.next() == "for the newer one"
    inboxes.put(A, "dropped: the request has left")
    async with inboxes.open(A, 1) as reopened:
        assert await reopened.next(timeout_s=0.0) is None
