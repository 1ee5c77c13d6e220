"""Memory that other processes of this host can map to read it, by a descriptor. Without torch."""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdserve.base.logs import get_logger

log = get_logger(__name__)

_ALIGNMENT = 64

Bytes = npt.NDArray[np.uint8]

#: Nobody maps the memory to write to it from now on (Linux 5.1; not in Python's `fcntl`).
_F_SEAL_FUTURE_WRITE = 0x10
#: A reader would get SIGBUS behind the end of a file that has shrunk.
_SEALS_OF_READERS = fcntl.F_SEAL_SHRINK


class ShareableMemory(Protocol):
    """Memory of this process that others of its host can map."""

    @property
    def is_on_gpu(self) -> bool:
        """Whether it is a GPU's: the host cannot access its bytes."""

    @property
    def is_pinned(self) -> bool:
        """Whether it is host memory that GPUs access: a process that maps it has to pin it."""

    @property
    def num_bytes(self) -> int:
        """Its size."""

    @property
    def bytes(self) -> Bytes:
        """All of it: uint8 [num_bytes], writable."""

    @property
    def file(self) -> int:
        """The descriptor by which it is mapped."""


class SharedMemory:
    """Implements `ShareableMemory`: host memory, zero at first, allocated page by page when it is written to.

    The memory lives as long as anything has a view of `bytes`, here or in another process.
    """

    is_on_gpu = False

    def __init__(self, num_bytes: int, *, is_pinned: bool = False) -> None:
        """`is_pinned`: GPUs access it. Raises `OSError` where the system has none, or the size cannot be mapped."""
        self.num_bytes = num_bytes
        self.is_pinned = is_pinned
        self._file = -1
        self._file = os.memfd_create("pdserve", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, num_bytes)
            memory = mmap.mmap(self._file, num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self._file)
            self._file = -1
            raise
        with suppress(OSError):  # Where the system has no large pages for shared memory.
            memory.madvise(mmap.MADV_HUGEPAGE)
        #: uint8 [num_bytes], writable.
        self.bytes: Bytes = np.frombuffer(memory, np.uint8)
        self._start = self.bytes.ctypes.data

    @property
    def file(self) -> int:
        """The descriptor, which `close` ends."""
        return self._file

    def offset_of(self, buffer: Bytes) -> int | None:
        """Where a contiguous buffer lies in the memory; None: it lies elsewhere."""
        offset = buffer.__array_interface__["data"][0] - self._start
        return offset if 0 <= offset <= self.num_bytes - buffer.nbytes else None

    def close(self) -> None:
        """Nobody else can map the memory any more. Views of it stay valid."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()


def zeros(num_bytes: int, *, is_shared: bool) -> tuple[Bytes, SharedMemory | None]:
    """Memory of zeros, uint8 [num_bytes], and what others can map of it; None: `is_shared` is False, or nothing.

    It begins at a multiple of 64 bytes: copies are faster then.
    """
    if is_shared:
        try:
            shared = SharedMemory(num_bytes)
        except (OSError, AttributeError) as error:
            log.warning("memory_not_shared", reason=error)
        else:
            return shared.bytes, shared
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + num_bytes], None


def map_to_read(file: int, num_bytes: int) -> Bytes:
    """The first bytes of a descriptor of another process's `SharedMemory`, read-only.

    Raises: OSError, ValueError when it is none, or is smaller.
    """
    if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS_OF_READERS:
        raise ValueError("the memory could shrink while it is read")
    if os.fstat(file).st_size < num_bytes:
        raise ValueError(f"the memory has fewer than {num_bytes} bytes")
    return np.frombuffer(mmap.mmap(file, num_bytes, prot=mmap.PROT_READ), np.uint8)
