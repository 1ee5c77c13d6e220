"""The KV cache as transports reach it: in place on a CPU, by way of pinned host memory on a GPU."""

from __future__ import annotations

import torch

from kvtransfer.memory import BlockMemory, InPlace
from kvtransfer.staging import Staged
from pdserve.base.errors import SetupError
from pdserve.engine.kv_cache import KvCache


def block_memory(kv_cache: KvCache, staging_bytes: int) -> BlockMemory:
    """Raises `SetupError` when the stage cannot be had or is too small for a block."""
    if kv_cache.memory is not None:
        return InPlace(kv_cache)
    block_bytes = kv_cache.layout.block_bytes
    if staging_bytes < block_bytes:
        raise SetupError(f"--staging-memory {staging_bytes} is too small for a KV block of {block_bytes} bytes.")
    try:
        stage = torch.empty(staging_bytes // block_bytes * block_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        raise SetupError(
            f"{staging_bytes / 2**20:.0f} MiB of pinned host memory cannot be had: {error}. Lower --staging-memory."
        ) from error
    return Staged(kv_cache, stage.numpy(), block_bytes)
