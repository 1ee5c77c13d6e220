"""Claims on GPUs: one locked file per GPU, in a directory that all workers of a machine share.

The kernel releases a lock when its process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from pdserve.worker.load.claim_policy import choose_gpus


class GpuClaims:
    """The locks of one worker on the GPUs' files, until it is closed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[int, int] = {}

    def __enter__(self) -> GpuClaims:
        return self

    def __exit__(self, *error: object) -> None:
        for gpu in tuple(self._files):
            self._release(gpu)

    def take(self, candidates: Sequence[int], count: int) -> range | None:
        """Claims `count` neighbouring GPUs that nobody holds; None, and no claim, when there are none."""
        looking = _open(self._directory / "gpus")
        try:
            fcntl.flock(looking, fcntl.LOCK_EX)
            free = [gpu for gpu in candidates if self._lock(gpu)]
            own = choose_gpus(free, count)
            for gpu in free:
                if own is None or gpu not in own:
                    self._release(gpu)
            return own
        finally:
            os.close(looking)

    def _lock(self, gpu: int) -> bool:
        # The UUID names the GPU in all containers. In each of them, the same GPU may have another number.
        file = _open(self._directory / f"gpu-{torch.cuda.get_device_properties(gpu).uuid}")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            return False
        self._files[gpu] = file
        return True

    def _release(self, gpu: int) -> None:
        os.close(self._files.pop(gpu))


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
