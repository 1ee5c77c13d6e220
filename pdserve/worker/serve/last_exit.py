"""How the previous process with this worker's id ended, whatever supervises it.

A process that is killed cannot say so. Therefore each one notes in Redis at its start that it was killed, and replaces
the note when it ends in another way. The next process with the same `--worker-id` finds the note, if it starts within
minutes: a worker that was scaled down and comes back hours later was not killed just now.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum

from pdserve.base.errors import SetupError, StoreError
from pdserve.redis.store import Store, as_bytes

EXIT_KEY = "exit:"
#: Time after the end of a process for which its note is kept. Supervisors wait for less before a restart.
_TTL_S = 900
#: A note is written again at this interval, so that it survives its TTL and a Redis that lost its data.
_REPEAT_S = 60.0


class Reason(StrEnum):
    """Why a worker's process ended. The values are labels of a metric."""

    STOPPED = "stopped"
    #: By a signal that cannot be handled, such as that of the kernel when memory runs out.
    KILLED = "killed"
    OUT_OF_MEMORY = "out_of_memory"
    #: By a setting, the model or the machine: see the last line of its log.
    SETUP = "setup"
    ERROR = "error"


class During(StrEnum):
    """What the worker was doing when it ended."""

    LOADING = "loading"
    SERVING = "serving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of a worker's process."""

    reason: Reason
    during: During


class ExitNote:
    """The note of the running process, written again every `repeat_s`."""

    def __init__(self, store: Store, worker_id: str, *, repeat_s: float = _REPEAT_S) -> None:
        self._store = store
        self._repeat_s = repeat_s
        self._changed = asyncio.Event()
        self._key = store.key(EXIT_KEY + worker_id)
        self._during = During.LOADING

    async def exchange(self) -> Exit | None:
        """Writes the first note. Returns how the previous process ended, if Redis knows."""
        with contextlib.suppress(StoreError):
            previous = await self._store.call("GET", self._key)
            await self._write(Reason.KILLED)
            return None if previous is None else _parse(as_bytes(previous))
        return None

    def serving(self) -> None:
        """Notes that the worker has been loaded."""
        self._during = During.SERVING
        self._changed.set()

    async def repeat(self) -> None:
        """Writes the note again, until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._repeat_s):
                    await self._changed.wait()
            self._changed.clear()
            with contextlib.suppress(StoreError):
                await self._write(Reason.KILLED)

    async def ended(self, reason: Reason) -> None:
        """Writes the last note."""
        with contextlib.suppress(StoreError):
            await self._write(reason)

    async def _write(self, reason: Reason) -> None:
        await self._store.call("SET", self._key, f"{reason} {self._during}", "EX", _TTL_S)


@asynccontextmanager
async def noting_exit(note: ExitNote) -> AsyncIterator[None]:
    """Repeats the note during the block, and notes how the block ends."""
    reason = Reason.STOPPED
    repeating = asyncio.create_task(note.repeat(), name="exit-note")
    try:
        yield
    except BaseException as error:
        reason = _reason_of(error)
        raise
    finally:
        repeating.cancel()
        await asyncio.wait([repeating])
        await note.ended(reason)


def _parse(text: bytes) -> Exit | None:
    """The note's contents; None for those of another version."""
    reason, _, during = text.decode(errors="replace").partition(" ")
    try:
        return Exit(reason=Reason(reason), during=During(during))
    except ValueError:
        return None


def _reason_of(error: BaseException) -> Reason:
    causes = list(_causes(error))
    if any(_is_out_of_memory(cause) for cause in causes):
        return Reason.OUT_OF_MEMORY
    if any(isinstance(cause, SetupError) for cause in causes):
        return Reason.SETUP
    return Reason.STOPPED if isinstance(error, asyncio.CancelledError) else Reason.ERROR


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, those that it groups, and what caused them."""
    yield error
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _causes(member)
    if error.__cause__ is not None:
        yield from _causes(error.__cause__)


def _is_out_of_memory(error: BaseException) -> bool:
    # torch raises a class of this name on a GPU, and on a CPU a RuntimeError of its allocator.
    name, text = type(error).__name__, str(error).lower()
    return isinstance(error, MemoryError) or name == "OutOfMemoryError" or "can't allocate memory" in text
