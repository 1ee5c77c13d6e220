"""A model's need for device memory, measured by running its largest steps."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.triton.sample_rows import MAX_ROWS
from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.base.sampling import MAX_N, SamplingParams
from pdserve.engine.device_batch import BatchShape
from pdserve.engine.graph_shapes import decode_shape
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import TokenSampler
from pdserve.engine.sequence import SampleRow
from pdserve.model.batch import Batch
from pdserve.model.decoder import Decoder
from pdserve.worker.load.kv_budget import show_bytes

log = get_logger(__name__)

#: Time without more free memory after which none is waited for.
_FREED_S = 3.0
_FREED_PAUSE_S = 0.1

#: With penalties, truncation and log-probabilities: the settings for which sampling needs most memory.
_LARGEST_SAMPLING = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)


class DeviceMemory(Protocol):
    """The memory of a device, in bytes."""

    def total(self) -> int:
        """Size of the memory."""

    def free(self) -> int:
        """Memory that no process uses."""

    def allocated(self) -> int:
        """Memory of this process's tensors."""

    def peak(self) -> int:
        """Maximum of `allocated` since `reset_peak`."""

    def reset_peak(self) -> None:
        """Starts a new period for `peak`."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """What the largest steps need in addition to weights and KV, in bytes."""

    peak: int
    #: Memory that CUDA graphs compute in, and that nothing else uses.
    graphs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """A GPU's memory when this worker started, and the worker's needs since, in bytes."""

    total: int
    #: Memory that was free before this worker allocated any.
    free: int
    weights: int
    #: As `Activations`.
    activations: int
    graphs: int = 0
    #: Buffers for communication between ranks.
    group: int = 0

    @property
    def used(self) -> int:
        """Everything but KV."""
        return self.weights + self.activations + self.graphs + self.group

    def __str__(self) -> str:
        graphs = f", CUDA graphs {show_bytes(self.graphs)}" if self.graphs else ""
        group = f", communication between ranks {show_bytes(self.group)}" if self.group else ""
        step = show_bytes(self.activations)
        return f"weights {show_bytes(self.weights)}, activations of the largest step {step}{graphs}{group}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSteps:
    """Bounds of what one step of a worker computes."""

    #: Prompt tokens in one step.
    num_tokens: int
    #: Prompt tokens behind which one step computes logits: the last ones of prompts, and those that are scored.
    num_logits: int
    #: Sequences that decode in one step; 0: none do.
    num_decoding: int
    #: Whether decode-only steps are replayed from CUDA graphs.
    replayed: bool = False


def await_free_memory(
    memory: DeviceMemory, needed: int, *, limit_s: float = _FREED_S, pause: Callable[[float], None] = time.sleep
) -> int:
    """The free memory, as soon as `needed` bytes are free or no more comes for `limit_s`.

    A worker that was killed keeps its memory until the workers that have mapped it have noticed. No event says when.
    """
    free, waited_s, total_s = memory.free(), 0.0, 0.0
    if free >= needed:
        return free
    log.info("waits_for_gpu_memory", free=free, needed=needed)
    while free < needed and waited_s < limit_s:
        pause(_FREED_PAUSE_S)
        waited_s += _FREED_PAUSE_S
        total_s += _FREED_PAUSE_S
        now = memory.free()
        if now > free:
            free, waited_s = now, 0.0
    log.info("waited_for_gpu_memory", free=free, seconds=round(total_s, 3))
    return free


def measure_activations(
    decoder: Decoder, sampler: TokenSampler | None, layout: KvLayout, memory: DeviceMemory, steps: LargestSteps
) -> Activations:
    """Runs the largest steps, with sampling, in a KV cache of one block that all rows overwrite.

    These are a chunk of prompts, decoding sequences padded as for graphs, and both together. `sampler` is None on ranks
    that sample no tokens. Raises `SetupError` when the steps do not fit, or cannot run at all.
    """
    weights = memory.allocated()
    try:
        return _peaks(decoder, sampler, layout, memory, steps)
    except torch.OutOfMemoryError as error:
        raise SetupError(
            f"Steps of {steps.num_tokens} prompt tokens and {steps.num_decoding} sequences do not fit into GPU memory: "
            f"the weights take {show_bytes(weights)} of {show_bytes(memory.total())}. Lower "
            "--max-num-batched-tokens or --max-num-seqs, or use a larger GPU."
        ) from error
    except RuntimeError as error:
        raise SetupError(f"The model does not run on {decoder.device}: {error}.") from error


def _peaks(
    decoder: Decoder, sampler: TokenSampler | None, layout: KvLayout, memory: DeviceMemory, steps: LargestSteps
) -> Activations:
    cache = KvCache(layout, 1, decoder.device)
    held = memory.allocated()
    peak = graphs = 0
    for batch in _largest_batches(layout, steps, decoder.max_model_len):
        memory.reset_peak()
        logits = decoder.forward(batch.to(decoder.device), cache.tensor)
        only_decodes = BatchShape.of(batch).is_decode_only
        if steps.replayed and only_decodes:
            # A graph keeps the memory that it computes in, and its logits.
            graphs = memory.peak() - held + logits.nbytes
        if sampler is not None:
            # All choices of a prompt are sampled at once.
            num_rows = len(logits) if only_decodes else min(MAX_ROWS, len(logits) * MAX_N)
            row = SampleRow(params=_LARGEST_SAMPLING, choice_index=0, tokens=array("q", [0]), num_prompt=1)
            sampler.sample(logits, [row] * num_rows, [index % len(logits) for index in range(num_rows)])
        peak = max(peak, memory.peak() - held)
    return Activations(peak=peak, graphs=graphs)


def _largest_batches(layout: KvLayout, steps: LargestSteps, longest: int) -> list[Batch]:
    whole, rest = divmod(steps.num_tokens, longest)
    prompts = [longest] * whole + [rest] * (rest > 0)
    batches = [_rows_of_block_0(layout, prompts, num_logits=steps.num_logits)]
    if steps.num_decoding:
        # The width of the block tables determines how much memory attention needs; context lengths only add time.
        num_blocks = -(-longest // layout.block_size)
        shape = decode_shape(steps.num_decoding, num_blocks)
        batches.append(_rows_of_block_0(layout, [1] * shape.num_sequences, num_blocks=shape.num_blocks))
        num_logits = steps.num_logits + steps.num_decoding
        both = [*prompts, *[1] * steps.num_decoding]
        batches.append(_rows_of_block_0(layout, both, num_blocks=num_blocks, num_logits=num_logits))
    return batches


def _rows_of_block_0(layout: KvLayout, lengths: list[int], *, num_blocks: int = 0, num_logits: int = 0) -> Batch:
    """Sequences of these lengths whose tokens are all new.

    `num_blocks`: minimum width of the block tables. `num_logits`: number of last rows with logits; 0: one per sequence.
    """
    positions = torch.cat([torch.arange(length) for length in lengths])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    needed = max(-(-length // layout.block_size) for length in lengths)
    every_row = torch.arange(len(positions))
    return Batch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slot_mapping=positions % layout.block_size,
        query_starts=starts,
        context_lens=torch.tensor(lengths),
        block_tables=torch.zeros((len(lengths), max(needed, num_blocks)), dtype=torch.int64),
        logits_rows=every_row[-num_logits:] if num_logits else starts[1:] - 1,
    )
