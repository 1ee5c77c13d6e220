"""Memory of the simulated GPU that several processes map: a driver whose descriptors are those of host memory.

As on a GPU, memory lives until the last process has unmapped it, and an access to what was unmapped ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import warnings
from typing import Any

import numpy as np
import torch

from pdserve.base.cuda_driver import CudaError
from pdserve.base.gpu_memory import GpuBytes
from tests.support.simulated_gpu.tensors import GARBAGE, DeviceTensor, Memory

#: As on a GPU, sizes are rounded up.
_GRANULARITY = 1 << 16
_PROT_NONE = 0
_libc = ctypes.CDLL(None, use_errno=True)


class Driver:
    """Implements `pdserve.base.gpu_memory.GpuDriver`."""

    def __init__(self) -> None:
        #: What is mapped here, by address.
        self.mapped: dict[int, np.ndarray[Any, Any]] = {}
        self._own: set[int] = set()

    def allocate(self, device: int, num_bytes: int) -> tuple[int, int, int]:
        size = -(-num_bytes // _GRANULARITY) * _GRANULARITY
        if Memory.allocated + size > Memory.total_bytes:
            raise CudaError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY (2)")
        file = os.memfd_create("simulated-gpu", os.MFD_CLOEXEC)
        os.ftruncate(file, size)
        address = self._keep(mmap.mmap(file, size))
        self.mapped[address][:] = GARBAGE
        self._own.add(address)
        Memory.allocated += size
        Memory.peak = max(Memory.peak, Memory.allocated)
        return address, size, file

    def map(self, device: int, file: int, num_bytes: int) -> int:
        try:
            if os.fstat(file).st_size < num_bytes:
                raise CudaError("cuMemMap: CUDA_ERROR_INVALID_VALUE (1)")
            return self._keep(mmap.mmap(file, num_bytes, prot=mmap.PROT_READ))
        except (OSError, ValueError) as error:
            raise CudaError(f"cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_VALUE (1): {error}") from error

    def device_of(self, address: int) -> int:
        return 0

    def unmap(self, device: int, address: int, num_bytes: int) -> None:
        memory = self.mapped.pop(address)
        assert len(memory) == num_bytes
        if address in self._own:
            self._own.remove(address)
            Memory.allocated -= num_bytes
        # Where something still has a view, the mapping stays. An access to it ends the process, as on a GPU.
        assert _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _PROT_NONE) == 0

    def pin(self, device: int, address: int, num_bytes: int, *, is_read_only: bool) -> int:
        if address in self.mapped:
            raise CudaError("cuMemHostRegister_v2: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (712)")
        self.mapped[address] = np.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), np.uint8)
        return address

    def unpin(self, device: int, address: int) -> None:
        del self.mapped[address]

    def tensor_of(self, buffer: GpuBytes) -> DeviceTensor:
        """Mapped memory as a tensor of bytes on the device, which keeps the buffer."""
        address, num_bytes = buffer.address, buffer.nbytes
        for start, memory in self.mapped.copy().items():
            if start <= address and address + num_bytes <= start + len(memory):
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # It may be memory to be read only.
                    there = torch.from_numpy(memory[address - start : address - start + num_bytes])
                return DeviceTensor(there, buffer)
        raise RuntimeError("CUDA error: invalid argument: an address that is not mapped")

    def _keep(self, mapping: mmap.mmap) -> int:
        memory = np.frombuffer(mapping, np.uint8)
        address = int(memory.ctypes.data)
        self.mapped[address] = memory
        return address
