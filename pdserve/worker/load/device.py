"""The device a worker computes on: whether it is there, and what a model needs of its memory, by trying."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Protocol

import torch

from kernels.triton.sample_rows import MAX_ROWS
from pdserve.base.config import variable
from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import MAX_N, SamplingParams
from pdserve.engine.device_batch import BatchShape
from pdserve.engine.graphs import decode_shape
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import TokenSampler
from pdserve.engine.sequence import SampleRow
from pdserve.model.batch import Batch
from pdserve.model.decoder import Decoder
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load.device_kv_budget import DeviceUse
from pdserve.worker.load.kv_budget import show_bytes

#: With edits, truncation and log-probabilities: what sampling needs most memory for.
_MOST = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=1)


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


def require_handover_memory(config: WorkerConfig) -> None:
    """Raises `SetupError` where blocks cannot stay in a GPU's memory on their way."""
    if config.handover_memory == "host":
        return
    others = {
        "--device cuda": config.device.startswith("cuda"),
        "--tensor-parallel-size 1": config.tensor_parallel_size == 1,
    }
    missing = [name for name, is_so in others.items() if not is_so]
    if missing:
        raise SetupError(f"--handover-memory device needs {', '.join(missing)}; leave it out for host memory.")
    if config.transport != "ucx":
        return  # NCCL has other processes map memory of its own only.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in (variable(name) or "").lower():
            raise SetupError(
                f"--handover-memory device does not go with expandable_segments in {name}: other processes cannot map "
                "such memory. Leave out one of them, or use --transport nccl between GPUs."
            )


def bind_thread(config: WorkerConfig) -> None:
    """Gives the calling thread the GPU's context, which UCX looks for in the thread that starts and drives it."""
    if config.handover_memory == "device":
        device = torch.device(config.device)
        torch.cuda.set_device(device.index or 0)
        torch.cuda.synchronize(device)


def open_device(name: str, num_ranks: int = 1) -> torch.device:
    """The device of that name, the first of `num_ranks`. Raises `SetupError` when this machine does not have them."""
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
    if index + num_ranks > count:
        wanted = "" if num_ranks == 1 else f" and --tensor-parallel-size {num_ranks} need cuda:{index} and the next"
        raise SetupError(f"--device {name}{wanted}: this machine has {count} GPUs, cuda:0 to cuda:{count - 1}.")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestSteps:
    """What the steps of a worker can come to."""

    #: Tokens of prompts in one step, and prompts of which a step computes the last.
    num_tokens: int
    num_prompts: int
    #: Sequences that decode in one step; 0: none do.
    num_decoding: int
    #: Steps that only decode are replayed from CUDA graphs.
    replayed: bool = False


def measure_use(
    decoder: Decoder,
    sampler: TokenSampler | None,
    layout: KvLayout,
    memory: DeviceMemory,
    *,
    free_before: int,
    group_bytes: int = 0,
    steps: LargestSteps,
) -> DeviceUse:
    """Runs the largest steps, with sampling, in a KV cache of one block, which all rows overwrite.

    Those are a chunk of prompts, decoding sequences as graphs pad them, and both together.

    `free_before`: before the weights were loaded, when this process had allocated nothing. `group_bytes`: as
    `DeviceUse.group`. `sampler`: None on ranks that draw no tokens. Raises `SetupError` when they do not fit, or
    cannot run at all.
    """
    weights = memory.allocated()
    cache = KvCache(layout, 1, decoder.device)
    held = memory.allocated()
    activations = graphs = 0
    try:
        for batch in _largest_batches(layout, steps, decoder.max_model_len):
            memory.reset_peak()
            logits = decoder.forward(batch.to(decoder.device), cache.tensor)
            only_decodes = BatchShape.of(batch).is_decode_only
            if steps.replayed and only_decodes:
                # What it computes in it keeps, and its logits.
                graphs = memory.peak() - held + logits.nbytes
            if sampler is not None:
                # Every choice of a prompt is drawn at once.
                num_rows = len(logits) if only_decodes else min(MAX_ROWS, len(logits) * MAX_N)
                rows = [SampleRow(params=_MOST, choice_index=0, tokens=array("q", [0]), num_prompt=1)] * num_rows
                sampler.sample(logits, rows, [row % len(logits) for row in range(num_rows)])
            activations = max(activations, memory.peak() - held)
    except torch.OutOfMemoryError as error:
        raise SetupError(
            f"Steps of {steps.num_tokens} prompt tokens and {steps.num_decoding} sequences do not fit into GPU memory "
            f"beside the weights, {show_bytes(weights)} of {show_bytes(memory.total())}. Lower "
            "--max-num-batched-tokens or --max-num-seqs, or use a larger GPU."
        ) from error
    except RuntimeError as error:
        raise SetupError(f"The model does not run on {decoder.device}: {error}.") from error
    return DeviceUse(
        total=memory.total(),
        free=free_before,
        weights=weights,
        activations=activations,
        graphs=graphs,
        group=group_bytes,
    )


def _largest_batches(layout: KvLayout, steps: LargestSteps, longest: int) -> list[Batch]:
    whole, rest = divmod(steps.num_tokens, longest)
    prompts = [longest] * whole + [rest] * (rest > 0)
    batches = [_rows_of_block_0(layout, prompts, num_logits=steps.num_prompts)]
    if steps.num_decoding:
        # The width of the tables decides what attention needs, the contexts how long it takes.
        num_blocks = -(-longest // layout.block_size)
        shape = decode_shape(steps.num_decoding, num_blocks)
        batches.append(_rows_of_block_0(layout, [1] * shape.num_sequences, num_blocks=shape.num_blocks))
        num_logits = steps.num_prompts + steps.num_decoding
        both = [*prompts, *[1] * steps.num_decoding]
        batches.append(_rows_of_block_0(layout, both, num_blocks=num_blocks, num_logits=num_logits))
    return batches


def _rows_of_block_0(layout: KvLayout, lengths: list[int], *, num_blocks: int = 0, num_logits: int = 0) -> Batch:
    """Sequences of these lengths, all tokens new; `num_logits`: of the last rows, 0: the last of each sequence."""
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
