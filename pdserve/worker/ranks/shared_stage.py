"""The stage of several ranks: shared memory in whose slots their heads form whole blocks."""

from __future__ import annotations

import mmap
import os

import torch
from torch import Tensor

from kernels.split import even_slice
from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout


def make_stage(size: int) -> int:
    """A descriptor of `size` bytes of shared memory, allocated on first write. Raises `SetupError`."""
    try:
        stage = os.memfd_create("pdserve-stage")
        os.ftruncate(stage, size)
    except (OSError, AttributeError) as error:
        raise SetupError(
            f"Cannot create {size / 2**20:.0f} MiB of shared memory (--staging-memory): {error}."
        ) from error
    return stage


def map_stage(stage: int, size: int, device: torch.device) -> Tensor:
    """The first `size` bytes of the stage, uint8, pinned if `device` is a GPU. Raises `SetupError`."""
    try:
        memory = torch.frombuffer(mmap.mmap(stage, size), dtype=torch.uint8)
    except (OSError, ValueError) as error:
        raise SetupError(
            f"Cannot map {size / 2**20:.0f} MiB of shared memory: {error}. Lower --staging-memory."
        ) from error
    if device.type == "cuda":
        with torch.cuda.device(device):
            code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)  # type: ignore[no-untyped-call]
        if int(code):
            raise SetupError(
                f"Cannot pin {size / 2**20:.0f} MiB of host memory (CUDA error {int(code)}). Lower --staging-memory."
            )
    return memory


def heads_of_rank(layout: KvLayout, rank: int, size: int) -> slice:
    """The rank's heads among those of a block."""
    return even_slice(layout.only_group.num_kv_heads, rank, size)
