from __future__ import annotations

import asyncio

import pytest

from pdserve.base.errors import PeerLost, StaleAttempt
from pdserve.base.ids import RequestId
from pdserve.worker.serve.inboxes import Failed, Inbox, Inboxes

A = RequestId("a")
WAIT_S = 10.0


async def test_events_come_in_order_whether_they_are_here_or_awaited() -> None:
    session: Inbox[str] = Inbox(A, 1)
    session.put("one")
    session.put("two")
    assert [await session.next(), await session.next(timeout_s=WAIT_S)] == ["one", "two"]
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        waiting = group.create_task(session.next())
        await asyncio.sleep(0)
        session.put("three")
    assert waiting.result() == "three"


async def test_no_event_in_time_is_none_and_loses_nothing() -> None:
    session: Inbox[str] = Inbox(A, 1)
    assert await session.next(timeout_s=0.0) is None
    session.put("late")
    assert await session.next(timeout_s=WAIT_S) == "late"


async def test_a_failure_is_raised_in_its_turn() -> None:
    session: Inbox[str] = Inbox(A, 1)
    session.put("one")
    session.put(Failed(error=PeerLost("gone")))
    assert await session.next() == "one"
    with pytest.raises(PeerLost):
        await session.next()


async def test_more_takes_what_is_here_up_to_the_first_of_another_kind() -> None:
    session: Inbox[str | int] = Inbox(A, 1)
    for event in (1, 2, "other", 3):
        session.put(event)
    assert list(session.more(int)) == [1, 2]
    assert list(session.more(int)) == []
    assert await session.next() == "other"
    assert list(session.more(int)) == [3]
    assert list(session.more(int)) == []


async def test_a_newer_attempt_takes_over_and_an_older_one_is_refused() -> None:
    sessions: Inboxes[str] = Inboxes()
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        opened = asyncio.Event()

        async def older() -> None:
            async with sessions.open(A, 1) as session:
                opened.set()
                with pytest.raises(StaleAttempt):
                    await session.next()

        group.create_task(older())
        await opened.wait()
        async with sessions.open(A, 2) as newer:
            with pytest.raises(StaleAttempt):
                async with sessions.open(A, 2):
                    raise AssertionError("the same attempt was opened twice")
            sessions.put(A, "for the newer one")
            assert await newer.next() == "for the newer one"
    sessions.put(A, "for nobody: dropped")
    assert sessions.find(A) is None
