"""Buffers of tests, in host memory or in a GPU's, where nobody reads and writes bytes directly."""

from __future__ import annotations

import hashlib
from typing import cast

import numpy as np
import torch

from kvtransfer.transport import Buffer


def payload_of(tag: int, size: int) -> Buffer:
    """The bytes a message of that tag has."""
    seed = int.from_bytes(hashlib.blake2b(str(tag).encode(), digest_size=8).digest(), "little")
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, size, dtype=np.uint8)


class Memory:
    """On a device of torch's name; None: host memory as NumPy has it."""

    def __init__(self, device: str | None) -> None:
        self._device = device

    def empty(self, size: int) -> Buffer:
        """Zeros."""
        return self._lay(np.zeros(size, np.uint8))

    def payload(self, tag: int, size: int) -> Buffer:
        """As `payload_of`."""
        return self._lay(payload_of(tag, size))

    def read(self, buffer: Buffer) -> Buffer:
        """The bytes, in host memory."""
        return buffer if self._device is None else torch.as_tensor(buffer, device=self._device).cpu().numpy()

    def fill(self, buffer: Buffer, byte: int) -> None:
        """As if it had been given to somebody else."""
        if self._device is None:
            buffer[:] = byte
        else:
            torch.as_tensor(buffer, device=self._device).fill_(byte)
            torch.cuda.synchronize(self._device)

    def _lay(self, payload: Buffer) -> Buffer:
        if self._device is None:
            return payload
        from pdserve.worker.kv_bytes.device_blocks import DeviceBytes

        there = torch.from_numpy(payload).to(self._device)
        torch.cuda.synchronize(self._device)
        return cast(Buffer, DeviceBytes(there))
