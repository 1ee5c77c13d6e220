"""The keys of block digests, stretched on a GPU once for each transfer."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

import torch
from torch import Tensor

from kernels.reference import blocks as reference
from kernels.triton import blocks as kernels

#: Serializes launches from the threads of concurrent transfers: Triton's interpreter has only one grid.
LAUNCHING = Lock()

_HOST = torch.device("cpu")


class TransferKeys:
    """The keys of one transfer."""

    def __init__(self, key: bytes, device: torch.device) -> None:
        """`key`: 16 bytes."""
        #: Those that a digest's last step needs, in host memory.
        self.first = reference.digest_keys(key, 0, _HOST)
        self._key = key
        self._device = device
        self._stretched: Tensor | None = None

    def on_device(self, packed_bytes: int) -> Tensor:
        """Keys for packed blocks of up to that size. Launches at first, on the current stream."""
        if self._stretched is None or len(self._stretched) < reference.num_key_pairs(packed_bytes):
            self._stretched = kernels.digest_keys(self._key, packed_bytes, self._device)
        return self._stretched


class DigestKeys:
    """The keys of recent transfers. Those that are dropped are still read by launches on the stream that made them."""

    def __init__(self, device: torch.device, max_kept: int) -> None:
        """Each transfer's keys are as large as its packed blocks."""
        self._device = device
        self._max_kept = max_kept
        self._kept: OrderedDict[bytes, TransferKeys] = OrderedDict()

    def of(self, key: bytes) -> TransferKeys:
        """The keys of a transfer, whose key has 16 bytes."""
        keys = self._kept.get(key)
        if keys is None:
            keys = self._kept[key] = TransferKeys(key, self._device)
            if len(self._kept) > self._max_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return keys
