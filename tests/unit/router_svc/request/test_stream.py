"""The stream from sagas to the client: order, errors, and clients that read nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from pdserve.base.errors import PeerLost
from router_svc.records.journal import Journal
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import KEEP_ALIVE_S, WRITE_TIMEOUT_S, DeltaStream, Write

pytestmark = pytest.mark.virtual_time


def new_stream() -> DeltaStream:
    """The stream of one prompt, whose journal is never used."""
    return DeltaStream([cast(Journal, SimpleNamespace())], lambda _: None)


def delta(text: str, choice_index: int = 0) -> list[ChoiceDelta]:
    return [ChoiceDelta(choice_index=choice_index, text=text)]


async def started(stream: DeltaStream, write: Write, group: asyncio.TaskGroup) -> asyncio.Task[None]:
    """`write_to`, called as an API layer does: before any saga runs."""
    task = group.create_task(stream.write_to(write))
    await asyncio.sleep(0)
    return task


async def test_deltas_are_written_one_at_a_time_in_the_order_of_put() -> None:
    stream, written = new_stream(), []
    gate, busy = asyncio.Event(), 0

    async def write(deltas: list[ChoiceDelta]) -> None:
        nonlocal busy
        busy += 1
        assert busy == 1
        await gate.wait()
        written.append(deltas[0].text)
        busy -= 1

    async with asyncio.TaskGroup() as group:
        await started(stream, write, group)
        puts = [group.create_task(stream.put(delta(text))) for text in "abc"]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.wait(puts)
        await stream.end()
    assert written == ["a", "b", "c"]


async def test_choices_are_numbered_as_in_the_response() -> None:
    stream, written = new_stream(), []

    async def write(deltas: list[ChoiceDelta]) -> None:
        written.extend(delta.choice_index for delta in deltas)

    async with asyncio.TaskGroup() as group:
        await started(stream, write, group)
        await stream.put(delta("a", choice_index=1))
        await stream.put(delta("b", choice_index=1), first_choice=4)
        await stream.end()
    assert written == [1, 5]


async def test_an_error_follows_the_write_in_progress_and_nothing_follows_the_error() -> None:
    stream, written, gate = new_stream(), [], asyncio.Event()

    async def write(deltas: list[ChoiceDelta]) -> None:
        await gate.wait()
        written.append(deltas[0].text)

    async def fails() -> None:
        with pytest.raises(PeerLost):
            await stream.write_to(write)
        assert written == ["a"]

    async with asyncio.TaskGroup() as group:
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


async def test_an_error_of_the_writer_reaches_the_api_layer_and_not_the_saga() -> None:
    stream = new_stream()

    async def write(deltas: list[ChoiceDelta]) -> None:
        raise ConnectionResetError("client gone")

    async def fails() -> None:
        with pytest.raises(ConnectionResetError, match="client gone"):
            await stream.write_to(write)

    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
        await asyncio.sleep(0)
        await stream.put(delta("a"))


async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    stream = new_stream()

    async def write(deltas: list[ChoiceDelta]) -> None:
        await asyncio.Event().wait()

    async def disconnects() -> None:
        with pytest.raises(ConnectionResetError, match="read nothing for 60 s"):
            await stream.write_to(write)
        putting.cancel()

    async with asyncio.TaskGroup() as group:
        group.create_task(disconnects())
        await asyncio.sleep(0)
        putting = group.create_task(stream.put(delta("a")))


async def test_a_client_that_waits_long_for_its_tokens_is_not_disconnected() -> None:
    stream, written = new_stream(), []

    async def write(deltas: list[ChoiceDelta]) -> None:
        written.append(deltas[0].text)

    async with asyncio.TaskGroup() as group:
        writing = await started(stream, write, group)
        await asyncio.sleep(10 * WRITE_TIMEOUT_S)
        assert not writing.done()
        await stream.put(delta("a"))
        await stream.end()
    assert written == ["a"]


async def test_a_stream_without_new_tokens_is_kept_alive() -> None:
    """Fails when a write does not count as life, or nothing is written while a worker is replaced."""
    stream = new_stream()
    now = asyncio.get_running_loop().time
    first, alive = now(), list[float]()

    async def write(_: list[ChoiceDelta]) -> None:
        pass

    async def keep_alive() -> None:
        alive.append(now() - first)

    async with asyncio.TaskGroup() as group:
        group.create_task(stream.write_to(write, keep_alive))
        await asyncio.sleep(0.6 * KEEP_ALIVE_S)
        await stream.put(delta("a"))
        await asyncio.sleep(2.5 * KEEP_ALIVE_S)
        await stream.end()
    assert alive == pytest.approx([1.6 * KEEP_ALIVE_S, 2.6 * KEEP_ALIVE_S], abs=0.01)


async def test_a_client_that_does_not_read_what_keeps_it_alive_is_disconnected() -> None:
    stream = new_stream()

    async def write(_: list[ChoiceDelta]) -> None:
        pass

    async def keep_alive() -> None:
        await asyncio.sleep(10 * WRITE_TIMEOUT_S)

    with pytest.raises(ConnectionResetError):
        await stream.write_to(write, keep_alive)
