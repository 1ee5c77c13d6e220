"""From sagas to the client: order, errors, and clients that take nothing."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.base.errors import PeerLost
from router_svc.request import stream as module
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import Stream

WAIT_S = 10.0


def new_stream() -> Stream:
    """Of one prompt, whose record nobody looks at."""
    return Stream([object()], lambda _: None)  # type: ignore[list-item]


def delta(text: str) -> list[ChoiceDelta]:
    return [ChoiceDelta(choice_index=0, text=text)]


async def started(stream: Stream, write: module.Write, group: asyncio.TaskGroup) -> asyncio.Task[None]:
    """`into`, begun as an API layer does: before any saga runs."""
    task = group.create_task(stream.into(write))
    await asyncio.sleep(0)
    return task


async def test_pieces_are_written_one_at_a_time_in_the_order_they_were_put() -> None:
    stream, written = new_stream(), []
    gate, busy = asyncio.Event(), 0

    async def write(deltas: list[ChoiceDelta]) -> None:
        nonlocal busy
        busy += 1
        assert busy == 1
        await gate.wait()
        written.append(deltas[0].text)
        busy -= 1

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        await started(stream, write, group)
        puts = [group.create_task(stream.put(delta(text))) for text in "abc"]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait(puts)
        await stream.end()
    assert written == ["a", "b", "c"]


async def test_an_error_comes_behind_what_is_being_written_and_nothing_comes_behind_it() -> None:
    stream, written, gate = new_stream(), [], asyncio.Event()

    async def write(deltas: list[ChoiceDelta]) -> None:
        await gate.wait()
        written.append(deltas[0].text)

    async def fails() -> None:
        with pytest.raises(PeerLost):
            await stream.into(write)
        assert written == ["a"]

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(fails())
        await asyncio.sleep(0)
        group.create_task(stream.put(delta("a")))
        await asyncio.sleep(0)
        group.create_task(stream.end(PeerLost("gone")))
        await asyncio.sleep(0)
        late = group.create_task(stream.put(delta("late")))
        gate.set()
        await late
    assert written == ["a"]


async def test_what_writing_raises_is_heard_by_the_api_layer_and_not_by_the_saga() -> None:
    stream = new_stream()

    async def write(deltas: list[ChoiceDelta]) -> None:
        raise ConnectionResetError("client gone")

    async def hears() -> None:
        with pytest.raises(ConnectionResetError, match="client gone"):
            await stream.into(write)

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(hears())
        await asyncio.sleep(0)
        await stream.put(delta("a"))


async def test_a_client_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.05)
    stream = new_stream()

    async def write(deltas: list[ChoiceDelta]) -> None:
        await asyncio.Event().wait()

    async def gives_up() -> None:
        with pytest.raises(ConnectionResetError):
            await stream.into(write)
        putting.cancel()

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(gives_up())
        await asyncio.sleep(0)
        putting = group.create_task(stream.put(delta("a")))


async def test_a_client_that_waits_long_for_its_tokens_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.01)
    stream, written = new_stream(), []

    async def write(deltas: list[ChoiceDelta]) -> None:
        written.append(deltas[0].text)

    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        into = await started(stream, write, group)
        _, pending = await asyncio.wait([into], timeout=0.05)
        assert pending
        await stream.put(delta("a"))
        await stream.end()
    assert written == ["a"]
