"""`pdserve plan`: what a model takes, how much fits, and how many workers a rate of requests needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from decode_svc.config import DecodeConfig
from pdserve.base.config import default_of, load, option, positional
from pdserve.base.errors import SetupError
from pdserve.base.option_values import parse_bytes
from pdserve.base.shared_options import same_option
from pdserve.cli.byte_sizes import decimal_size
from pdserve.cli.model_sizes import ModelSizes, SizeOptions, model_sizes
from pdserve.cli.plan.capacity import GB, MARGIN, Load, Machine, Memory, assumed_speeds, fit, workers
from pdserve.cli.plan.profile import Profile, parse_profile
from pdserve.cli.plan.report import ASSUMED, MEASURED, Plan, as_json, show_plan
from pdserve.cli.up_config import DEFAULT_MODEL
from pdserve.cli.up_model import describe_progress
from pdserve.cli.weight_memory import packing_instruction_set
from pdserve.model.fetch.config_only import config_of
from pdserve.observe.machine import available_memory_bytes
from pdserve.worker.config import CPU_STEP, DTYPES, GPU_STEP, KV_CACHE_DTYPES, QUANTIZATIONS, WorkerConfig

#: Speeds of a rank when nothing was measured: a data-center GPU, and two cores with AVX-512 and bfloat16.
_GPU = Machine(bytes_per_s=2000 * GB, flops_per_s=300e12, bandwidth_share=0.6, flops_share=0.4)
_CPU = Machine(bytes_per_s=60 * GB, flops_per_s=0.75e12, bandwidth_share=0.6, flops_share=0.6)
#: Difference of lengths beyond which a profile says little about the plan.
_LENGTH_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """Settings of `pdserve plan`."""

    model: str = positional(
        DEFAULT_MODEL, help="name, directory, config.json, .gguf file or hub id of the model", metavar="MODEL"
    )
    gpu_memory: int | None = option(
        None, help="memory of each GPU, such as 80GB; default: CPU workers in the memory free here", parse=parse_bytes
    )
    isl: int = option(1024, help="average prompt length in tokens", minimum=1, metavar="TOKENS")
    osl: int = option(256, help="average completion length in tokens", minimum=1, metavar="TOKENS")
    rate: float = option(1.0, help="requests per second", minimum=0.0001)
    cached_share: float = option(0.0, help="share of prompt tokens found in prefix caches, 0 to 1", minimum=0)
    busy_share: float = option(0.7, help="share of the time that workers may be busy", minimum=0.01)
    profile: str | None = option(
        None, help="result of pdserve bench serve --save-result, for measured speeds", metavar="FILE"
    )
    profile_prefill: int = option(1, help="prefill workers that the profile was measured with", minimum=1)
    profile_decode: int = option(1, help="decode workers that the profile was measured with", minimum=1)
    memory_bandwidth: float | None = option(
        None, help="memory bandwidth of a rank in GB/s, instead of the assumed one", minimum=0.001
    )
    tflops: float | None = option(
        None, help="dense TFLOP/s of a rank in --dtype, instead of the assumed ones", minimum=0.001
    )
    tensor_parallel_size: int = option(1, help="ranks per worker", minimum=1)
    gpu_memory_utilization: float = option(
        default_of(WorkerConfig, "gpu_memory_utilization"), help="share of the memory for a worker", minimum=0.03
    )
    dtype: str = option("auto", help="data type of weights and KV", choices=DTYPES)
    kv_cache_dtype: str = option("auto", help="data type of KV", choices=KV_CACHE_DTYPES)
    quantization: str | None = option(None, help="round the weights, on CPUs only", choices=QUANTIZATIONS)
    block_size: int = option(default_of(WorkerConfig, "block_size"), help="tokens per KV block", minimum=1)
    max_num_seqs: int | None = same_option(DecodeConfig, "max_num_seqs")
    max_num_batched_tokens: int | None = same_option(WorkerConfig, "max_num_batched_tokens")
    cache_dir: str | None = option(None, help="directory for downloaded models", metavar="DIR")
    json: bool = option(False, help="print JSON instead of a table")


def main(argv: Sequence[str]) -> int:
    """Prints the plan. Raises `SetupError` that names the term that does not fit."""
    config = load(PlanConfig, "plan", argv, description=__doc__)
    plan = make_plan(config)
    if config.json:
        print(as_json(plan))
    else:
        show_plan(plan)
    return 0


def make_plan(config: PlanConfig) -> Plan:
    """The plan for these settings. Raises `SetupError`."""
    _require_consistent(config)
    sizes = _sizes(config)
    load_of = Load(
        input_tokens=config.isl,
        output_tokens=config.osl,
        requests_per_s=config.rate,
        cached_share=config.cached_share,
    )
    default = CPU_STEP if config.gpu_memory is None else GPU_STEP
    memory = Memory(
        total_bytes=config.gpu_memory or available_memory_bytes() // config.tensor_parallel_size,
        utilization=config.gpu_memory_utilization,
        max_num_batched_tokens=config.max_num_batched_tokens or default.prompt_tokens,
        max_num_seqs=config.max_num_seqs or default.sequences,
    )
    fitting = fit(sizes, memory, load_of)
    machine, profile = _machine(config), _profile(config)
    speeds = (
        assumed_speeds(sizes, fitting, load_of, machine, memory.max_num_seqs) if profile is None else profile.speeds
    )
    return Plan(
        model=config.model,
        sizes=sizes,
        fit=fitting,
        load=load_of,
        speeds=speeds,
        workers=workers(sizes, speeds, load_of, busy_share=config.busy_share),
        speed_basis=ASSUMED if profile is None else MEASURED,
        assumptions=[*_memory_notes(config, memory), *_speed_notes(config, machine, profile)],
    )


def _sizes(config: PlanConfig) -> ModelSizes:
    cache_dir = None if config.cache_dir is None else Path(config.cache_dir).expanduser()
    options = SizeOptions(
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        quantization=config.quantization,
        block_size=config.block_size,
        num_ranks=config.tensor_parallel_size,
        packed_for=(
            packing_instruction_set(config.tensor_parallel_size, config.kv_cache_dtype)
            if config.gpu_memory is None
            else None
        ),
    )
    return model_sizes(config_of(config.model, cache_dir=cache_dir, progress=_report), options)


def _require_consistent(config: PlanConfig) -> None:
    if config.cached_share >= 1:
        raise SetupError(f"--cached-share is {config.cached_share:g}, but must be below 1. Prompts have a last token.")
    if config.busy_share > 1:
        raise SetupError(f"--busy-share is {config.busy_share:g}, but must be at most 1.")
    if config.quantization is not None and config.gpu_memory is not None:
        raise SetupError(f"--quantization {config.quantization} is for CPU workers. Leave it out, or --gpu-memory.")


def _machine(config: PlanConfig) -> Machine:
    base = _CPU if config.gpu_memory is None else _GPU
    return Machine(
        bytes_per_s=base.bytes_per_s if config.memory_bandwidth is None else config.memory_bandwidth * GB,
        flops_per_s=base.flops_per_s if config.tflops is None else config.tflops * 1e12,
        bandwidth_share=base.bandwidth_share,
        flops_share=base.flops_share,
    )


def _profile(config: PlanConfig) -> Profile | None:
    if config.profile is None:
        return None
    try:
        text = Path(config.profile).read_text(encoding="utf-8")
    except OSError as error:
        raise SetupError(f"Cannot read the profile {config.profile}: {error.strerror}. Check --profile.") from error
    return parse_profile(text, config.profile, num_prefill=config.profile_prefill, num_decode=config.profile_decode)


def _memory_notes(config: PlanConfig, memory: Memory) -> list[str]:
    where = "each GPU" if config.gpu_memory is not None else "each rank on this machine, now free"
    return [
        f"Memory: {decimal_size(memory.total_bytes)} of {where}, of which {memory.utilization - MARGIN:.0%} are usable "
        f"({memory.utilization:.0%} for the worker, less a margin of {MARGIN:.0%}). Activations are an upper bound.",
        f"Workers are planned to be busy {config.busy_share:.0%} of the time, without spare ones for failures.",
    ]


def _speed_notes(config: PlanConfig, machine: Machine, profile: Profile | None) -> list[str]:
    if profile is None:
        return [
            f"Speeds are assumed: {machine.bytes_per_s / GB:,.0f} GB/s, of which decoding reaches "
            f"{machine.bandwidth_share:.0%}, and {machine.flops_per_s / 1e12:g} TFLOP/s, of which prompts reach "
            f"{machine.flops_share:.0%}, per rank. Set --memory-bandwidth and --tflops, or better measure: --profile.",
        ]
    notes = [
        f"Speeds are measured: {profile.num_runs} runs of {profile.model or 'an unnamed model'} in {config.profile}, "
        f"with {config.profile_prefill} prefill and {config.profile_decode} decode workers. They are lower bounds: the "
        "load of the benchmark may not have been enough to reach more."
    ]
    for name, measured, planned in (
        ("prompts", profile.mean_input_tokens, config.isl),
        ("completions", profile.mean_output_tokens, config.osl),
    ):
        if abs(measured - planned) > _LENGTH_TOLERANCE * planned:
            notes.append(
                f"The measured {name} had {measured:.0f} tokens on average, the planned ones have {planned}. "
                "Measure with the planned lengths for a better plan."
            )
    return notes


def _report(what: str, done_bytes: int, total_bytes: int | None) -> None:
    if not done_bytes:
        print(describe_progress(what, done_bytes, total_bytes), file=sys.stderr)
