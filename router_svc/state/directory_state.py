"""State in a directory, for a single router: a file for each record. Events and claims are in memory.

The record of work that runs when the router ends stays open in its file, and has no claim when the next router starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from math import inf
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from pdserve.base.errors import SetupError, StoreError
from pdserve.base.logs import get_logger
from pdserve.base.tasks import run_to_completion
from pdserve.observe.metrics import GaugeSource
from router_svc.state.memory_events import MemoryEvents
from router_svc.state.state_store import DELETED_TTL_S, MAX_RECORD_BYTES, EventBatch, Stage, require_size

log = get_logger(__name__)

#: Bytes of all records. Beyond this, the oldest ones are deleted.
MAX_BYTES = 4 << 30
_SWEEP_S = 3600.0
#: Share of `MAX_BYTES` that is left after records were deleted, so that not every write has to delete some.
_SWEPT = 0.9
_OPEN, _ENDED, _FRESH = ".open", ".ended", ".fresh"

Result = TypeVar("Result")


class DirectoryState:
    """A `StateStore` of one router. Belongs to one event loop.

    Changes of a record come one after the other, and each runs to its end, also when its caller is cancelled: a thread
    that writes cannot be stopped, and a claim must hold for as long as its holder writes.
    """

    def __init__(self, directory: Path, *, ttl_s: float, max_bytes: int = MAX_BYTES) -> None:
        """Raises `SetupError` if the directory cannot be used, or another router uses it."""
        self._directory = directory
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._claims: dict[str, str] = {}
        self._events = MemoryEvents()
        #: When records were deleted for good.
        self._deleted_at: dict[str, float] = {}
        #: Bytes of all records, as far as known: they are counted at the start, and every hour.
        self._used_bytes = 0
        self._sweeping = asyncio.Lock()
        #: Held while a record is changed.
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SetupError(f"--state-url: {directory} cannot be used: {error.strerror}.") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise SetupError(
                f"--state-url: another router uses {directory}. Give each its own, or a Redis to all of them."
            ) from None
        for path in directory.glob(f"*{_FRESH}"):  # What a lost router was writing.
            path.unlink(missing_ok=True)
        for path in directory.glob(f"*{_ENDED}"):  # What it was ending.
            path.with_suffix(_OPEN).unlink(missing_ok=True)

    def close(self) -> None:
        """Lets other routers use the directory."""
        os.close(self._lock)

    def gauges(self) -> Sequence[GaugeSource]:
        """There are no gauges: the disk is the machine's."""
        return ()

    async def run(self) -> None:
        """Deletes what has expired, now and every hour."""
        while True:
            await self._make_room()
            self._events.forget_old()
            too_old = time.monotonic() - DELETED_TTL_S
            self._deleted_at = {key: at for key, at in self._deleted_at.items() if at > too_old}
            await asyncio.sleep(_SWEEP_S)

    async def require_writable(self) -> None:
        """Raises `StoreError` when the disk has no space for a record."""
        usage = await self._in_thread(lambda: shutil.disk_usage(self._directory))
        if usage.free < MAX_RECORD_BYTES:
            raise StoreError(f"The disk of {self._directory} has only {usage.free} bytes left.")

    async def create(
        self, key: str, record: bytes, *, holder: str = "", is_listed: bool = False, is_again: bool = False
    ) -> bool:
        """Stores a record, new and open with a `holder`. The files are the list. Raises `TooLarge`, `StoreError`."""
        require_size(record)

        async def create() -> bool:
            stage = await self.stage(key)
            if stage in (Stage.CLAIMED, Stage.LEFT) or (holder and stage is Stage.ENDED):
                return False
            if is_again and time.monotonic() - self._deleted_at.get(key, -inf) < DELETED_TTL_S:
                return False
            await self._store(key, record, is_open=bool(holder))
            if holder:
                self._claims[key] = holder
            return True

        return await self._alone(key, create)

    async def read(self, key: str) -> bytes | None:
        """The record. Raises `StoreError`."""
        return await self._in_thread(lambda: self._read(key))

    async def stage(self, key: str) -> Stage:
        """How far the record is. Raises `StoreError`."""
        stage = await self._in_thread(lambda: self._stage(key))
        return Stage.CLAIMED if stage is Stage.LEFT and key in self._claims else stage

    async def update(self, key: str, record: bytes, holder: str, *, is_open: bool) -> bool:
        """Changes an open record. Raises `TooLarge` and `StoreError`."""
        require_size(record)

        async def update() -> bool:
            if self._claims.get(key) != holder or not self._path(key, is_open=True).exists():
                return False
            await self._store(key, record, is_open=is_open)
            if not is_open:
                self._claims.pop(key, None)
            return True

        return await self._alone(key, update)

    async def delete(self, key: str, *, for_good: bool = False) -> bool:
        """Deletes a record. Raises `StoreError`."""

        async def delete() -> bool:
            self._claims.pop(key, None)
            self._events.drop(key)
            if for_good:
                self._deleted_at[key] = time.monotonic()
            freed = await self._in_thread(lambda: self._delete(key))
            self._used_bytes -= freed or 0
            return freed is not None

        return await self._alone(key, delete)

    async def claim(self, key: str, holder: str) -> bool:
        """Claims an open record."""

        async def claim() -> bool:
            if not self._path(key, is_open=True).exists():
                return False
            return self._claims.setdefault(key, holder) == holder

        return await self._alone(key, claim)

    async def release(self, key: str, holder: str) -> None:
        """Gives a claim back."""

        async def release() -> None:
            if self._claims.get(key) == holder:
                del self._claims[key]

        await self._alone(key, release)

    async def unclaimed(self) -> list[str]:
        """Keys of open records without a claim. Raises `StoreError`."""
        paths = await self._in_thread(lambda: [*self._directory.glob(f"*{_OPEN}")])
        keys = [path.name.removesuffix(_OPEN) for path in paths]
        return [key for key in keys if key not in self._claims]

    async def listed(self, group: str) -> list[str]:
        """Keys of the group's records. Raises `StoreError`."""
        names = await self._in_thread(lambda: [path.name for path in self._directory.glob(f"{group}:*")])
        ends = (_OPEN, _ENDED)
        return sorted({name.removesuffix(end) for name in names for end in ends if name.endswith(end)})

    async def append(self, key: str, batch: EventBatch) -> None:
        """Adds events, unless the record is gone. Raises `StoreError`."""
        if await self.stage(key) is not Stage.GONE:
            self._events.append(key, batch)

    async def events(self, key: str, after: int, *, wait_s: float) -> list[EventBatch]:
        """Events behind `after`."""
        return await self._events.behind(key, after, wait_s=wait_s)

    async def _alone(self, key: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """Work on a record while no other work on it runs."""

        async def alone() -> Result:
            async with self._locks.setdefault(key, asyncio.Lock()):
                return await work()

        return await run_to_completion(alone())

    async def _store(self, key: str, record: bytes, *, is_open: bool) -> None:
        self._used_bytes += await self._in_thread(lambda: self._write(key, record, is_open=is_open))
        async with self._sweeping:
            if self._used_bytes > self._max_bytes:
                await self._make_room()

    async def _make_room(self) -> None:
        claimed = {*self._claims}
        try:
            self._used_bytes = await self._in_thread(lambda: self._sweep(claimed))
        except StoreError as error:
            log.warning("state_not_swept", reason=error)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise StoreError(f"The directory {self._directory} cannot be used: {error.strerror}.") from error

    def _path(self, key: str, *, is_open: bool) -> Path:
        return self._directory / (key + (_OPEN if is_open else _ENDED))

    def _read(self, key: str) -> bytes | None:
        for is_open in (True, False, True):  # It may end in between.
            path = self._path(key, is_open=is_open)
            with contextlib.suppress(FileNotFoundError):
                if not is_open and time.time() - path.stat().st_mtime > self._ttl_s:
                    return None
                return path.read_bytes()
        return None

    def _stage(self, key: str) -> Stage:
        if self._path(key, is_open=True).exists():
            return Stage.LEFT
        with contextlib.suppress(FileNotFoundError):
            age_s = time.time() - self._path(key, is_open=False).stat().st_mtime
            return Stage.ENDED if age_s <= self._ttl_s else Stage.GONE
        return Stage.LEFT if self._path(key, is_open=True).exists() else Stage.GONE

    def _write(self, key: str, record: bytes, *, is_open: bool) -> int:
        """Returns by how many bytes the records have grown."""
        path = self._path(key, is_open=is_open)
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}{_FRESH}")
        try:
            with open(fresh, "xb", opener=_private) as file:
                file.write(record)
                file.flush()
                os.fsync(file.fileno())
            before = _size(path)
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
        return len(record) - before - _removed(self._path(key, is_open=not is_open))

    def _delete(self, key: str) -> int | None:
        """The bytes that were deleted; None: there is no record."""
        paths = [path for is_open in (True, False) if (path := self._path(key, is_open=is_open)).exists()]
        return sum(map(_removed, paths)) if paths else None

    def _sweep(self, claimed: Collection[str] = ()) -> int:
        """Deletes records that have expired, and the oldest ones of too many. Returns the bytes of those that are left.

        An open record that is not `claimed` is work for a router until it has expired.
        """
        ended, left, now = [], 0, time.time()
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # It was deleted meanwhile.
                found = path.stat()
                left += found.st_size
                is_left = path.suffix == _OPEN and path.name.removesuffix(_OPEN) not in claimed
                if path.suffix == _ENDED or (is_left and now - found.st_mtime > self._ttl_s):
                    ended.append((found, path))
        kept = self._max_bytes * _SWEPT if left > self._max_bytes else left
        for found, path in sorted(ended, key=lambda each: each[0].st_mtime):
            if left <= kept and now - found.st_mtime <= self._ttl_s:
                break
            left -= _removed(path)
        return left


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _removed(path: Path) -> int:
    """The size of a file that is removed; 0: there is none."""
    size = _size(path)
    path.unlink(missing_ok=True)
    return size


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
