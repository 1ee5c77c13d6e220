"""How many sequences fit on a worker, and how many workers a rate of requests needs. Pure; docs have the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.base.errors import SetupError
from pdserve.cli.byte_sizes import decimal_size
from pdserve.cli.model_sizes import ModelSizes

GB = 1e9
#: Share of a worker's memory that stays free, as on GPUs.
MARGIN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What clients ask for, on average."""

    input_tokens: int
    output_tokens: int
    requests_per_s: float
    #: Share of the prompt tokens that prefix caches have.
    cached_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The memory of one rank."""

    total_bytes: int
    #: Share for the worker.
    utilization: float
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What fits into the memory of one worker, over all its ranks."""

    usable_bytes: int
    activation_bytes: int
    kv_bytes: int
    num_blocks: int
    kv_tokens: int
    #: Sequences of full length, and of their average length while they decode.
    full_sequences: int
    average_sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """Speeds of one worker, measured or assumed, in tokens per second."""

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    #: Sequences that decode at once at that speed.
    decoding: int
    #: Time between two tokens of one of them; None: unknown.
    tpot_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """Workers per tier for a load, and what travels between the tiers."""

    prefill: int
    decode: int
    #: Without rounding up and without spare capacity.
    prefill_load: float
    decode_load: float
    handover_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Assumed speeds of one rank: what the hardware can do, and which share of it is reached."""

    bytes_per_s: float
    flops_per_s: float
    bandwidth_share: float
    flops_share: float


def fit(sizes: ModelSizes, memory: Memory, load: Load) -> Fit:
    """What fits. Raises `SetupError` that names the term that does not."""
    length = _length(sizes, load)
    usable = int(memory.total_bytes * (memory.utilization - MARGIN)) * sizes.num_ranks
    if sizes.weight_bytes > usable:
        raise SetupError(
            f"The weights do not fit: {decimal_size(sizes.weight_bytes)} in {sizes.dtype}, but a worker can use "
            f"{decimal_size(usable)} of {decimal_size(memory.total_bytes)} on {_ranks(sizes)}. Use more "
            "ranks (--tensor-parallel-size), a smaller model, or more memory."
        )
    activations = _activation_bytes(sizes, memory)
    kv_bytes = usable - sizes.weight_bytes - activations
    if kv_bytes < sizes.block_bytes:
        raise SetupError(
            f"The activations do not fit: {decimal_size(activations)} for {memory.max_num_batched_tokens} tokens in a "
            f"step and {memory.max_num_seqs} sequences, but {decimal_size(usable - sizes.weight_bytes)} are left after "
            "the weights. Lower --max-num-batched-tokens or --max-num-seqs, or use more memory."
        )
    num_blocks = kv_bytes // sizes.block_bytes
    full_blocks = math.ceil(length / sizes.block_size)
    if full_blocks > num_blocks:
        raise SetupError(
            f"One sequence does not fit: {length} tokens need {decimal_size(full_blocks * sizes.block_bytes)} of KV, "
            f"but {decimal_size(kv_bytes)} are left after weights and activations, which hold "
            f"{num_blocks * sizes.block_size} tokens. Lower --isl or --osl, use more ranks, or "
            "--kv-cache-dtype fp8_e4m3."
        )
    average_blocks = math.ceil((load.input_tokens + load.output_tokens / 2) / sizes.block_size)
    return Fit(
        usable_bytes=usable,
        activation_bytes=activations,
        kv_bytes=kv_bytes,
        num_blocks=num_blocks,
        kv_tokens=num_blocks * sizes.block_size,
        full_sequences=num_blocks // full_blocks,
        average_sequences=num_blocks // average_blocks,
    )


def assumed_speeds(sizes: ModelSizes, fitting: Fit, load: Load, machine: Machine, max_num_seqs: int) -> Speeds:
    """Speeds from what the hardware can do: prompts are limited by operations, decoding by memory bandwidth."""
    flops_per_s = machine.flops_per_s * machine.flops_share * sizes.num_ranks
    per_token = sizes.flops_per_token + sizes.flops_per_token_and_context * load.input_tokens / 2
    decoding = max(1, min(fitting.average_sequences, max_num_seqs))
    context = load.input_tokens + load.output_tokens / 2
    read_bytes = sizes.read_bytes + decoding * context * sizes.kv_bytes_per_token
    memory_s = read_bytes / (machine.bytes_per_s * machine.bandwidth_share * sizes.num_ranks)
    compute_s = decoding * (sizes.flops_per_token + sizes.flops_per_token_and_context * context) / flops_per_s
    step_s = max(memory_s, compute_s)
    return Speeds(
        prefill_tokens_per_s=flops_per_s / per_token,
        decode_tokens_per_s=decoding / step_s,
        decoding=decoding,
        tpot_s=step_s,
    )


def workers(sizes: ModelSizes, speeds: Speeds, load: Load, *, busy_share: float) -> Workers:
    """Workers that serve the load while they are busy for at most `busy_share` of the time."""
    computed = load.requests_per_s * load.input_tokens * (1 - load.cached_share)
    prefill = computed / speeds.prefill_tokens_per_s
    decode = load.requests_per_s * load.output_tokens / speeds.decode_tokens_per_s
    return Workers(
        prefill=max(1, math.ceil(prefill / busy_share)),
        decode=max(1, math.ceil(decode / busy_share)),
        prefill_load=prefill,
        decode_load=decode,
        handover_bytes_per_s=load.requests_per_s * load.input_tokens * sizes.kv_bytes_per_token,
    )


def _length(sizes: ModelSizes, load: Load) -> int:
    length = load.input_tokens + load.output_tokens
    if length > sizes.max_model_len:
        raise SetupError(
            f"A sequence of {length} tokens (--isl {load.input_tokens} + --osl {load.output_tokens}) exceeds the "
            f"model's limit of {sizes.max_model_len}. Lower them, or choose another model."
        )
    return length


def _activation_bytes(sizes: ModelSizes, memory: Memory) -> int:
    """Two hidden states, the inner one twice in two bytes each, and float32 logits: a rough upper bound."""
    per_token = 2 * (4 * sizes.hidden_size + 2 * sizes.intermediate_size)
    return memory.max_num_batched_tokens * per_token + memory.max_num_seqs * sizes.vocab_size * 4


def _ranks(sizes: ModelSizes) -> str:
    return "one rank" if sizes.num_ranks == 1 else f"each of {sizes.num_ranks} ranks"
