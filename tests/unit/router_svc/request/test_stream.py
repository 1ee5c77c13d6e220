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


async def test_deltas_are_written_one_at_a_time_in_the_order_of_push() -> None:
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
        for text in "abc":
            stream.push(delta(text))
        await asyncio.sleep(0)
        gate.set()
        await stream.wait_until_written()
        assert written == ["a", "b", "c"]
        stream.end()


async def test_choices_are_numbered_as_in_the_response() -> None:
    stream, written = new_stream(), []

    async def write(deltas: list[ChoiceDelta]) -> None:
        written.extend(delta.choice_index for delta in deltas)

    async with asyncio.TaskGroup() as group:
        await started(stream, write, group)
        stream.push(delta("a", choice_index=1))
        stream.push(delta("b", choice_index=1), first_choice=4)
        stream.end()
    assert written == [1, 5]


async def test_an_error_follows_what_was_pushed_before_and_nothing_follows_the_error() -> None:
    stream, written, gate = new_stream(), [], asyncio.Event()

    async def write(deltas: list[ChoiceDelta]) -> None:
        await gate.wait()
        written.append(deltas[0].text)

    async def fails() -> None:
        with pytest.raises(PeerLost):
            await stream.write_to(write)
        assert written == ["a", "b"]

    async with asyncio.TaskGroup() as group:
        group.create_task(fails())
        await asyncio.sleep(0)
        stream.push(delta("a"))
        await asyncio.sleep(0)
        stream.push(delta("b"))
        stream.end(PeerLost("gone"))
        stream.push(delta("late"))
        gate.set()


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
        stream.push(delta("a"))
        await stream.wait_until_written()


async def test_a_client_that_reads_nothing_is_disconnected() -> None:
    stream = new_stream()

    async def write(deltas: list[ChoiceDelta]) -> None:
        await asyncio.Event().wait()

    async def disconnects() -> None:
        with pytest.raises(ConnectionResetError, match="read nothing for 60 s"):
            await stream.write_to(write)

    async with asyncio.TaskGroup() as group:
        group.create_task(disconnects())
        stream.push(delta("a"))
        await stream.wait_until_written()


async def test_a_client_that_waits_long_for_its_tokens_is_not_disconnected() -> None:
    stream, written = new_stream(), []

    async def write(deltas: list[ChoiceDelta]) -> None:
        written.append(deltas[0].text)

    async with asyncio.TaskGroup() as group:
        writing = await started(stream, write, group)
        await asyncio.sleep(10 * WRITE_TIMEOUT_S)
        assert not writing.done()
        stream.push(delta("a"))
        stream.end()
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
        stream.push(delta("a"))
        await asyncio.sleep(2.5 * KEEP_ALIVE_S)
        stream.end()
    assert alive == pytest.approx([1.6 * KEEP_ALIVE_S, 2.6 * KEEP_ALIVE_S], abs=0.01)


async def test_a_client_that_does_not_read_what_keeps_it_alive_is_disconnected() -> None:
    stream = new_stream()

    async def write(_: list[ChoiceDelta]) -> None:
        pass

    async def keep_alive() -> None:
        await asyncio.sleep(10 * WRITE_TIMEOUT_S)

    with pytest.raises(ConnectionResetError):
        await stream.write_to(write, keep_alive)


async def test_what_was_pushed_is_written_whatever_happens_to_the_saga() -> None:
    """Fails when a push of a cancelled attempt waits for its turn: what the next attempt goes on behind is missing."""
    stream, written, reads = new_stream(), list[str](), asyncio.Event()

    async def write(deltas: list[ChoiceDelta]) -> None:
        await reads.wait()
        written.extend(delta.text for delta in deltas)

    async def attempt() -> None:
        stream.push(delta("b"))
        await stream.wait_until_written()

    async with asyncio.TaskGroup() as group:
        await started(stream, write, group)
        stream.push(delta("a"))
        cancelled = group.create_task(attempt())
        await asyncio.sleep(0)
        cancelled.cancel()
        stream.push(delta("c"))
        stream.end()
        reads.set()
    assert written == ["a", "b", "c"]


async def test_a_saga_waits_while_its_client_is_far_behind() -> None:
    stream, num_pushed, reads = new_stream(), 0, asyncio.Semaphore(0)

    async def write(_: list[ChoiceDelta]) -> None:
        await reads.acquire()

    async def saga() -> None:
        nonlocal num_pushed
        for _ in range(100):
            stream.push(delta("a"))
            num_pushed += 1
            await stream.wait_for_room()
        stream.end()

    async with asyncio.TaskGroup() as group:
        await started(stream, write, group)
        group.create_task(saga())
        await asyncio.sleep(1.0)
        assert num_pushed == 16
        reads.release()
        await asyncio.sleep(1.0)
        assert num_pushed == 17
        for _ in range(99):
            reads.release()


async def test_a_prompt_that_is_complete_does_not_wait_for_the_others_of_its_request() -> None:
    """Fails when it waits until nothing is left to write: with a slow client that is the end of the last prompt."""
    stream, num_written = new_stream(), 0

    async def write(_: list[ChoiceDelta]) -> None:
        nonlocal num_written
        await asyncio.sleep(1.0)
        num_written += 1

    async def other_prompt() -> None:
        for _ in range(30):
            stream.push(delta("b"))
            await stream.wait_for_room()

    async with asyncio.TaskGroup() as group:
        await started(stream, write, group)
        stream.push(delta("a"))
        group.create_task(other_prompt())
        await stream.wait_until_written()
        assert num_written == 1
        await asyncio.sleep(100.0)
        stream.end()
    assert num_written == 31


@pytest.mark.parametrize("has_ended", [False, True])
async def test_an_aborted_request_does_not_wait_for_its_client(has_ended: bool) -> None:
    stream, written, ends = new_stream(), list[str](), asyncio.Event()
    now = asyncio.get_running_loop().time
    first = now()

    async def write(deltas: list[ChoiceDelta]) -> None:
        await ends.wait()
        written.extend(delta.text for delta in deltas)

    async def aborted() -> None:
        with pytest.raises(PeerLost, match="gone"):
            await stream.write_to(write)
        assert now() - first < 1.0

    async with asyncio.TaskGroup() as group:
        group.create_task(aborted())
        stream.push(delta("a"))
        stream.push(delta("b"))
        await asyncio.sleep(0.5)
        if has_ended:
            stream.end()
        stream.abort(PeerLost("gone"))
        stream.push(delta("late"))
        await stream.wait_until_written()
    assert written == []
