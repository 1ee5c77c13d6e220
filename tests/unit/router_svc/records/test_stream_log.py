"""What a router takes the answers of Redis for, and what reading a long stream leaves to others."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.base.sampling import ChoiceTokens
from router_svc.records.resumable import Charge, LoggedStep, steps_to_bytes
from router_svc.records.stream_log import Ending, Found, LogEvents, StreamKey, StreamLog
from router_svc.records.stream_scripts import APPEND, FORGET, LEAVE, RENEW, START, TAKEN
from router_svc.records.stream_seal import StreamSeal
from router_svc.routing.home import Home
from tests.unit.router_svc.records.test_resumable import RESUMABLE

DONE = b""


async def _no_take(log: StreamLog) -> Found:
    raise AssertionError("nothing is taken")


def new_log(found: Found | None = None) -> StreamLog:
    events = LogEvents(due=lambda log: None, take=_no_take, stopped=lambda reason: None)
    return StreamLog(RESUMABLE, StreamKey(stream="stream", output="output"), StreamSeal(None), events, found)


def started() -> StreamLog:
    log = new_log()
    assert log.write()[0] == START
    assert not log.answered(DONE)
    return log


def append(log: StreamLog, token: int) -> None:
    log.append(0, [ChoiceTokens(choice_index=0, first_index=0, token_ids=(token,))], cached_tokens=0, home=Home())


@pytest.mark.parametrize(("ending", "last"), [(Ending.COMPLETE, LEAVE), (Ending.FAILED, FORGET)])
async def test_the_answer_to_a_renewal_does_not_end_a_stream(ending: Ending, last: str) -> None:
    """Fails when the end is taken as written: the stream stayed as running, and could be resumed and charged again."""
    log = started()
    assert log.write()[0] == RENEW
    async with asyncio.TaskGroup() as group:
        group.create_task(log.end(ending, Charge()))
        await asyncio.sleep(0)
        assert log.answered(DONE), "the end is still to be written"
        assert not log.is_over
        assert log.write()[0] == last
        assert not log.answered(DONE)
        assert log.is_over


async def test_output_that_comes_while_a_renewal_is_on_its_way_is_written() -> None:
    log = started()
    assert log.write()[0] == RENEW
    append(log, 1)
    assert log.answered(DONE)
    for index in (0, 1):
        assert log.write()[:1] + log.write()[3:4] == [APPEND, index], "repeated until there is an answer"
        log.answered(DONE)
        append(log, 2)


async def test_a_stream_that_was_only_found_is_not_ended() -> None:
    """Another router runs it, until this one takes it."""
    log = new_log(Found(nonce="f00d", fence=1))
    assert not log.is_ours
    await asyncio.wait_for(log.end(Ending.LEFT, Charge()), 1.0)
    assert not log.has_ended


async def test_a_router_whose_stream_was_taken_says_so_once() -> None:
    log, taken = started(), list[str]()
    log.on_taken = lambda: taken.append("taken")
    log.write()
    assert not log.answered(TAKEN)
    assert (log.is_ours, log.is_over, taken) == (False, True, ["taken"])


async def test_reading_a_long_stream_lets_others_run() -> None:
    """Fails when all of it is read at once: 4 MiB held the event loop for more than a second."""
    step = LoggedStep(
        prompt_index=0, choices=(ChoiceTokens(choice_index=0, first_index=0, token_ids=(1,)),), cached_tokens=0
    )
    pieces = tuple(StreamSeal(None).seal(steps_to_bytes([step] * 1000), "f00d", index) for index in range(3))
    log, num_turns, num_read = new_log(Found(nonce="f00d", fence=1, pieces=pieces)), 0, 0

    async def others() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    async for _ in log.steps():
        num_read += 1
    running.cancel()
    assert num_read == 3000
    assert num_turns > 3000 // 40
