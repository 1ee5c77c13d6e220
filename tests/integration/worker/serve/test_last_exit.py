"""A worker's process finds in Redis how the previous one ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.private_redis import PrivateRedis
from pdserve.redis.store import Store
from pdserve.worker.serve.last_exit import EXIT_KEY, During, Exit, ExitNote, Reason, noting_exit
from tests.support.redis import eventually


class OutOfMemoryError(RuntimeError):
    """Named as that of torch."""


async def _previous(store: Store, worker_id: str = "decode-0") -> Exit | None:
    return await ExitNote(store, worker_id).exchange()


async def _is_noted(store: Store, text: bytes) -> bool:
    return await store.call("GET", store.key(EXIT_KEY + "decode-0")) == text


@asynccontextmanager
async def _repeated(note: ExitNote) -> AsyncIterator[None]:
    """Repeats the note, and stops as a killed process does."""
    repeating = asyncio.create_task(note.repeat())
    try:
        yield
    finally:
        repeating.cancel()
        await asyncio.wait([repeating])


async def test_the_first_process_finds_nothing_and_a_killed_one_is_found_by_the_next(worker_store: Store) -> None:
    assert await _previous(worker_store) is None
    assert await _previous(worker_store) == Exit(reason=Reason.KILLED, during=During.LOADING)
    assert await _previous(worker_store, "decode-1") is None


async def test_a_worker_killed_at_work_differs_from_one_killed_while_loading(worker_store: Store) -> None:
    note = ExitNote(worker_store, "decode-0")
    await note.exchange()
    note.serving()
    async with _repeated(note):
        await eventually(lambda: _is_noted(worker_store, b"killed serving"))
    assert await _previous(worker_store) == Exit(reason=Reason.KILLED, during=During.SERVING)


async def test_a_note_is_forgotten_a_while_after_its_process_and_kept_while_that_loads(worker_store: Store) -> None:
    note, key = ExitNote(worker_store, "decode-0", repeat_s=0.01), worker_store.key(EXIT_KEY + "decode-0")
    await note.exchange()
    assert 60 < await worker_store.call("TTL", key) <= 1800
    await worker_store.call("DEL", key)
    async with _repeated(note):
        await eventually(lambda: _is_noted(worker_store, b"killed loading"))
    assert 60 < await worker_store.call("TTL", key) <= 1800


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), Reason.OUT_OF_MEMORY),
        (ExceptionGroup("tasks", [ValueError(), OutOfMemoryError("CUDA out of memory")]), Reason.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), Reason.OUT_OF_MEMORY),
        (SetupError("The KV cache does not fit."), Reason.SETUP),
        (ValueError("step"), Reason.ERROR),
        (asyncio.CancelledError(), Reason.STOPPED),
    ],
)
async def test_an_error_is_noted_by_what_it_was(worker_store: Store, error: BaseException, reason: Reason) -> None:
    note = ExitNote(worker_store, "decode-0")
    await note.exchange()
    with pytest.raises(type(error)):
        async with noting_exit(note):
            raise error
    assert await _previous(worker_store) == Exit(reason=reason, during=During.LOADING)


async def test_an_orderly_end_is_noted_as_one(worker_store: Store) -> None:
    note = ExitNote(worker_store, "decode-0")
    async with noting_exit(note):
        await note.exchange()
    assert await _previous(worker_store) == Exit(reason=Reason.STOPPED, during=During.LOADING)


@pytest.mark.own_redis
async def test_the_note_of_another_version_and_a_lost_redis_are_no_error(
    worker_store: Store, redis_server: PrivateRedis
) -> None:
    await worker_store.call("SET", worker_store.key(EXIT_KEY + "decode-0"), "evaporated serving")
    assert await _previous(worker_store) is None
    await redis_server.stop()
    async with noting_exit(ExitNote(worker_store, "decode-0")):
        assert await _previous(worker_store) is None
