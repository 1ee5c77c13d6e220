"""Buffers of tests in host memory or on a GPU, where bytes cannot be accessed directly."""

from __future__ import annotations

import hashlib
from typing import cast

import numpy as np
import torch

from kvtransfer.transport import Buffer


def payload_of(tag: int, size: int) -> Buffer:
    """The bytes of a message with that tag."""
    seed = int.from_bytes(hashlib.blake2b(str(tag).encode(), digest_size=8).digest(), "little")
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, size, dtype=np.uint8)


class Memory:
    """Memory on a torch device; None: NumPy arrays in host memory."""

    def __init__(self, device: str | None) -> None:
        self._device = device

    def empty(self, size: int) -> Buffer:
        """A buffer of zeros."""
        return self._to_device(np.zeros(size, np.uint8))

    def payload(self, tag: int, size: int) -> Buffer:
        """A buffer with the bytes of `payload_of`."""
        return self._to_device(payload_of(tag, size))

    def read(self, buffer: Buffer) -> Buffer:
        """The buffer's bytes in host memory."""
        return buffer if self._device is None else torch.as_tensor(buffer, device=self._device).cpu().numpy()

    def fill(self, buffer: Buffer, byte: int) -> None:
        """Overwrites a buffer, as its next owner does."""
        if self._device is None:
            buffer[:] = byte
        else:
            torch.as_tensor(buffer, device=self._device).fill_(byte)
            torch.cuda.synchronize(self._device)

    def _to_device(self, payload: Buffer) -> Buffer:
        if self._device is None:
            return payload
        from pdserve.base.gpu_memory import GpuBytes

        there = torch.from_numpy(payload).to(self._device)
        torch.cuda.synchronize(self._device)
        return cast(Buffer, GpuBytes(there.device.index, there.data_ptr(), there.nbytes, there))
