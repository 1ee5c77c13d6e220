"""Memory of a GPU that other processes of this host can map to read it, by a descriptor. Without torch.

Host memory that a GPU accesses is seen as if it were the GPU's.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol

import numpy as np

from pdserve.base.cuda_driver import CudaDriver, CudaError
from pdserve.base.shared_memory import Bytes


class GpuDriver(Protocol):
    """A GPU's memory below torch. `device`: as torch numbers it. All raise `CudaError`."""

    def allocate(self, device: int, num_bytes: int) -> tuple[int, int, int]:
        """New memory: its address, its size, which is `num_bytes` or a little more, and a descriptor for others."""

    def map(self, device: int, file: int, num_bytes: int) -> int:
        """The address at which this device reads another process's memory."""

    def device_of(self, address: int) -> int:
        """The GPU that has the memory at an address."""

    def unmap(self, device: int, address: int, num_bytes: int) -> None:
        """Takes back what `allocate` or `map` returned. Nothing may use the memory any more."""

    def pin(self, device: int, address: int, num_bytes: int, *, is_read_only: bool) -> int:
        """The address at which this device accesses host memory. `is_read_only`: how this process has mapped it."""

    def unpin(self, device: int, address: int) -> None:
        """Takes back `pin` of host memory at that address. The device may not access it any more."""


@functools.cache
def open_driver() -> GpuDriver:
    """The driver of this host. Raises: CudaError."""
    return CudaDriver()


class GpuBytes:
    """A range of GPU memory as transports' `Buffer`. The host cannot access its bytes."""

    ndim = 1
    dtype = np.dtype(np.uint8)

    def __init__(self, device: int, address: int, num_bytes: int, owner: object) -> None:
        """`device`: the GPU that has the memory. `owner`: kept alive, and with it the memory."""
        self.nbytes = num_bytes
        self.device = device
        self.address = address
        self._owner = owner
        #: Version 3 of the interface. Without a stream: the memory is ready when it is handed out.
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, span: slice) -> GpuBytes:
        start, stop, _ = span.indices(self.nbytes)
        return GpuBytes(self.device, self.address + start, max(0, stop - start), self._owner)


class _Mapping:
    """Unmaps memory with its last use. That may take long."""

    def __init__(self, device: int, address: int, num_bytes: int) -> None:
        unmap = weakref.finalize(self, open_driver().unmap, device, address, num_bytes)
        unmap.atexit = False


class _Pinned:
    """Host memory that is pinned until its last use."""

    def __init__(self, device: int, memory: Bytes, *, is_read_only: bool) -> None:
        here = memory.ctypes.data
        self.address = open_driver().pin(device, here, memory.nbytes, is_read_only=is_read_only)
        # Unmapped only behind that: memory that takes its place would seem to be pinned.
        self._memory = memory
        unpin = weakref.finalize(self, open_driver().unpin, device, here)
        unpin.atexit = False


class GpuMemory:
    """Bytes on a GPU, with garbage at first. Implements `pdserve.base.shared_memory.ShareableMemory`.

    The memory lives as long as anything has a part of `bytes`, here or in another process.
    """

    is_on_gpu = True
    is_pinned = False

    def __init__(self, device: int, num_bytes: int) -> None:
        """Raises: CudaError where the GPU has none, or shares none."""
        self._file = -1
        self._address, self.num_bytes, self._file = open_driver().allocate(device, num_bytes)
        #: The memory, [num_bytes].
        self.bytes: Bytes = _buffer(device, self._address, self.num_bytes)

    @property
    def file(self) -> int:
        """The descriptor, which `close` ends."""
        return self._file

    def close(self) -> None:
        """Nobody else can map the memory any more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()


def map_to_read(device: int, file: int, num_bytes: int) -> Bytes:
    """Memory behind another process's descriptor, to be read by this device.

    Raises: OSError where it cannot be mapped: it is none, is smaller, or the GPUs do not reach each other.
    """
    try:
        return _buffer(device, open_driver().map(device, file, num_bytes), num_bytes)
    except CudaError as error:
        raise OSError(str(error)) from error


def pinned(device: int, memory: Bytes, *, is_read_only: bool) -> Bytes:
    """Host memory as this device accesses it: uint8, as large. Takes some 0.1 s for 128 MiB. On any thread.

    Raises: OSError where it cannot be pinned.
    """
    try:
        mapping = _Pinned(device, memory, is_read_only=is_read_only)
    except CudaError as error:
        raise OSError(str(error)) from error
    buffer: Bytes = GpuBytes(device, mapping.address, memory.nbytes, mapping)  # type: ignore[assignment]
    return buffer


def _buffer(device: int, address: int, num_bytes: int) -> Bytes:
    mapping, owner = _Mapping(device, address, num_bytes), open_driver().device_of(address)
    buffer: Bytes = GpuBytes(owner, address, num_bytes, mapping)  # type: ignore[assignment]
    return buffer
