"""The device a worker computes on: whether it is there, and what a model needs of its memory, by trying."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.engine.kv_cache import KvCache
from pdserve.model.batch import Batch
from pdserve.model.decoder import Decoder
from pdserve.worker.device_memory import DeviceUse
from pdserve.worker.memory import show_bytes


class DeviceMemory(Protocol):
    """What a device tells about its memory, in bytes."""

    def total(self) -> int:
        """All of it."""

    def free(self) -> int:
        """What no process has."""

    def allocated(self) -> int:
        """By tensors of this process."""

    def peak(self) -> int:
        """The most that `allocated` was since `reset_peak`."""

    def reset_peak(self) -> None:
        """Begins to watch for the peak."""


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Implements `DeviceMemory`."""

    device: torch.device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self.device)[1]

    def free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)


def open_device(name: str) -> torch.device:
    """The device of that name. Raises `SetupError` when this machine does not have it."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SetupError(f"--device {name} is no device; write cpu, cuda or cuda:1.") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise SetupError(f"--device {name} is not supported; supported: cpu and cuda.")
    if not torch.cuda.is_available():
        why = "this build of torch is without CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        raise SetupError(f"--device {name} needs a GPU: {why}.")
    count = torch.cuda.device_count()
    index = device.index or 0
    if index >= count:
        raise SetupError(f"--device {name}: this machine has {count} GPUs, cuda:0 to cuda:{count - 1}.")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def measure_use(
    decoder: Decoder,
    layout: KvLayout,
    memory: DeviceMemory,
    *,
    free_before: int,
    num_rows: int,
    num_logits: int,
) -> DeviceUse:
    """Runs the largest step, a chunk of `num_rows` tokens, in a KV cache of one block, which all of them overwrite.

    `free_before`: before the weights were loaded, when this process had allocated nothing. `num_logits`: rows whose
    logits are wanted.
    """
    weights = memory.allocated()
    cache = KvCache(layout, 1, decoder.device)
    held = memory.allocated()
    memory.reset_peak()
    num_rows = min(num_rows, decoder.max_model_len)
    rows = torch.arange(num_rows)
    batch = Batch(
        token_ids=torch.zeros(num_rows, dtype=torch.int64),
        positions=rows,
        slot_mapping=rows % layout.block_size,
        query_starts=torch.tensor([0, num_rows]),
        context_lens=torch.tensor([num_rows]),
        block_tables=torch.zeros((1, -(-num_rows // layout.block_size)), dtype=torch.int64),
        logits_rows=rows[-num_logits:],
    )
    try:
        decoder.forward(batch.to(decoder.device), cache.tensor)
        activations = memory.peak() - held
    except torch.OutOfMemoryError as error:
        raise SetupError(
            f"A step of {num_rows} tokens does not fit into GPU memory beside the weights, {show_bytes(weights)} of "
            f"{show_bytes(memory.total())}. Lower --max-num-batched-tokens, or use a larger GPU."
        ) from error
    return DeviceUse(total=memory.total(), free=free_before, weights=weights, activations=activations)
