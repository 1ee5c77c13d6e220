"""The keys of block digests, stretched on a GPU once for each transfer."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from threading import Lock

import torch
from torch import Tensor

from kernels.reference.blocks import LANES, num_key_pairs
from kernels.triton import blocks as kernels
from pdserve.base.config import variable

#: Held by threads that launch: Triton's interpreter has only one grid.
LAUNCHING: AbstractContextManager[object] = Lock() if variable("TRITON_INTERPRET") else nullcontext()


class TransferKeys:
    """The keys of one transfer. Its methods are called on the stream that uses them."""

    def __init__(self, key: bytes, device: torch.device) -> None:
        """`key`: 16 bytes."""
        self._key = key
        self._device = device
        self._stretched: Tensor | None = None
        #: Those that a digest's last step needs, in host memory, behind the first launch that uses the keys.
        self.first = torch.empty(3 * LANES, dtype=torch.int64, pin_memory=device.type == "cuda")

    def on_device(self, packed_bytes: int) -> Tensor:
        """Keys for packed blocks of up to that size. Launches at first."""
        if self._stretched is None or len(self._stretched) < num_key_pairs(packed_bytes):
            self._stretched = kernels.digest_keys(self._key, packed_bytes, self._device)
            self.first.copy_(self._stretched[: 3 * LANES], non_blocking=True)
        return self._stretched


class DigestKeys:
    """The keys of recent transfers. Those that are dropped are still read by launches on the stream that made them.

    On any thread.
    """

    def __init__(self, device: torch.device, max_kept: int) -> None:
        """Each transfer's keys are as large as its packed blocks."""
        self._device = device
        self._max_kept = max_kept
        self._lock = Lock()
        self._kept: OrderedDict[bytes, TransferKeys] = OrderedDict()

    def of(self, key: bytes) -> TransferKeys:
        """The keys of a transfer, whose key has 16 bytes."""
        with self._lock:
            keys = self._kept.get(key)
            if keys is None:
                keys = self._kept[key] = TransferKeys(key, self._device)
                if len(self._kept) > self._max_kept:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return keys
