"""A worker's process finds in Redis how the previous one ended."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.base.errors import SetupError
from pdserve.base.store import Store
from pdserve.cli.private_redis import PrivateRedis
from pdserve.worker.serve.last_exit import EXIT_KEY, During, Exit, ExitNote, Reason, noted_exit
from tests.support.redis import eventually


class OutOfMemoryError(RuntimeError):
    """Named as that of torch."""


async def _previous(store: Store, worker_id: str = "decode-0") -> Exit | None:
    return await ExitNote(store, worker_id).replace()


async def test_the_first_process_finds_nothing_and_a_killed_one_is_found_by_the_next(worker_store: Store) -> None:
    assert await _previous(worker_store) is None
    assert await _previous(worker_store) == Exit(reason=Reason.KILLED, during=During.LOADING)
    assert await _previous(worker_store, "decode-1") is None


async def test_a_worker_killed_at_work_differs_from_one_killed_while_loading(worker_store: Store) -> None:
    note = ExitNote(worker_store, "decode-0")
    await note.replace()
    serving = asyncio.create_task(note.serving())

    async def is_noted() -> bool:
        return await worker_store.call("GET", worker_store.key(EXIT_KEY + "decode-0")) == b"killed serving"

    await eventually(is_noted)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert await _previous(worker_store) == Exit(reason=Reason.KILLED, during=During.SERVING)


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
    await note.replace()
    with pytest.raises(type(error)):
        async with noted_exit(note):
            raise error
    assert await _previous(worker_store) == Exit(reason=reason, during=During.LOADING)


async def test_an_orderly_end_is_noted_as_one(worker_store: Store) -> None:
    note = ExitNote(worker_store, "decode-0")
    async with noted_exit(note):
        await note.replace()
    assert await _previous(worker_store) == Exit(reason=Reason.STOPPED, during=During.LOADING)


async def test_the_note_of_another_version_and_a_lost_redis_are_no_error(
    worker_store: Store, redis_server: PrivateRedis
) -> None:
    await worker_store.call("SET", worker_store.key(EXIT_KEY + "decode-0"), "evaporated serving")
    assert await _previous(worker_store) is None
    await redis_server.stop()
    async with noted_exit(ExitNote(worker_store, "decode-0")):
        assert await _previous(worker_store) is None
