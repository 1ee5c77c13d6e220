"""The results of a batch: a file that is only appended to, and says after an interruption what is left to do."""

from __future__ import annotations

import asyncio
import fcntl
import os
from pathlib import Path

from pdserve.base.batch_lines import RESULT_PREFIX, custom_id_of
from pdserve.base.errors import SetupError
from pdserve.base.tasks import run_to_completion

_START = f'{{"id": "{RESULT_PREFIX}'.encode()


class OutputFile:
    """Results that are on the disk once `append` returns. For one event loop."""

    def __init__(self, path: Path) -> None:
        """Reads what is there, and removes a last line that was not written to its end.

        Raises `SetupError` if the file cannot be written, is used by another process, or has anything but results.
        """
        self._path = path
        #: Requests whose results the file had.
        self.custom_ids: set[str] = set()
        self._size = 0
        self._pending: list[bytes] = []
        self._lock = asyncio.Lock()
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise self._unusable(error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
        except BlockingIOError:
            self.close()
            raise SetupError(f"Another process writes {path}. Wait for it, or name another --output-file.") from None
        except OSError as error:
            self.close()
            raise self._unusable(error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)

    async def append(self, line: bytes) -> None:
        """Writes a line, together with those of others that wait. Raises `SetupError` when the disk refuses."""
        self._pending.append(line)
        async with self._lock:
            lines, self._pending = self._pending, []
            if lines:
                await run_to_completion(asyncio.to_thread(self._write, b"".join(lines)))

    def _write(self, data: bytes) -> None:
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError as error:
            os.truncate(self._file, self._size)
            raise self._unusable(error) from error
        self._size += len(data)

    def _read(self) -> None:
        with os.fdopen(os.dup(self._file), "rb") as file:
            for number, line in enumerate(file, start=1):
                custom_id = custom_id_of(line)
                if custom_id is not None and line.endswith(b"\n"):
                    self.custom_ids.add(custom_id)
                    self._size += len(line)
                elif line.endswith(b"\n") or not (line.startswith(_START) or _START.startswith(line)):
                    raise SetupError(
                        f"{self._path}, line {number}: It is no result of a batch. Name another --output-file."
                    )
        os.truncate(self._file, self._size)

    def _unusable(self, error: OSError) -> SetupError:
        return SetupError(f"Cannot write {self._path}: {error.strerror}. Check --output-file.")
