"""Loads a model on a GPU: waits for its memory, reads the weights, and sizes the KV cache by what is left."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch

from pdserve.base.config import variable
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.base.timing import timed
from pdserve.engine.job import MAX_SCORED_TOKENS
from pdserve.model.decoder import Decoder
from pdserve.model.loader import load_weights, make_decoder
from pdserve.worker.load.device_kv_budget import plan_device_kv
from pdserve.worker.load.kept_activations import kept_activations
from pdserve.worker.load.kv_budget import KvBudget
from pdserve.worker.load.load_plan import LoadPlan
from pdserve.worker.load.memory_profile import (
    CudaMemory,
    LargestSteps,
    MemoryProfile,
    await_free_memory,
    measure_activations,
)
from pdserve.worker.load.samplers import open_sampler

log = get_logger(__name__)

#: Number of prompts whose last tokens one step can compute, as far as memory is set aside for their logits.
_MAX_PROMPTS = 64
#: What decides how torch and cuBLAS allocate memory.
_ALLOCATION_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")


def load_on_gpu(plan: LoadPlan, group_bytes: int) -> tuple[Decoder, KvBudget]:
    """The decoder, and the size of a KV cache that fits beside it.

    `group_bytes`: GPU memory that communication between ranks has taken. Raises `SetupError` with the numbers.
    """
    config, model, options, ranks = plan.config, plan.model, plan.options, plan.ranks
    memory = CudaMemory(plan.device)
    needed = int(memory.total() * config.gpu_memory_utilization) - group_bytes
    free = await_free_memory(memory, needed) + group_bytes
    with timed(log, "weights_loaded") as fields:
        weights = load_weights(
            config.model_dir, model, dtype=config.dtype, device=str(plan.device), rank=ranks.rank, size=ranks.size
        )
        fields["bytes"] = memory.allocated()
    longest = min(config.max_model_len or model.default_context, model.max_context)
    with timed(log, "kernels_chosen"):
        decoder = make_decoder(model, weights, max_model_len=longest, kernels=options, ranks=ranks)
    budget = plan_device_kv(
        plan.rank_layout(longest),
        _profile(plan, decoder, free, group_bytes),
        plan.kv_request,
        utilization=config.gpu_memory_utilization,
        num_ranks=ranks.size,
        staging_bytes=config.staging_memory if config.handover_memory == "device" else 0,
    )
    budget = plan.agree(budget)
    if budget.max_model_len != longest:
        decoder = make_decoder(model, weights, max_model_len=budget.max_model_len, kernels=options, ranks=ranks)
    return decoder, budget


def _profile(plan: LoadPlan, decoder: Decoder, free: int, group_bytes: int) -> MemoryProfile:
    """`free`: bytes before the weights were loaded, and before communication between ranks took `group_bytes`."""
    config, memory = plan.config, CudaMemory(plan.device)
    layout, sampler = plan.rank_layout(decoder.max_model_len), open_sampler(decoder) if plan.ranks.rank == 0 else None
    steps = LargestSteps(
        num_tokens=config.max_prompt_tokens,
        num_logits=min(config.max_prompt_tokens, _MAX_PROMPTS + MAX_SCORED_TOKENS),
        num_decoding=config.max_decoding,
        replayed=plan.replays(decoder),
    )
    sizes = {"total": memory.total(), "weights": memory.allocated(), "group": group_bytes}
    measure = partial(measure_activations, decoder, sampler, layout, memory, steps)
    with timed(log, "gpu_memory", device=str(plan.device), **sizes) as fields:
        # Ranks compute every step together, so all of them measure, or none; one alone may have kept it.
        is_alone = plan.ranks.size == 1
        settings = _settings(plan, decoder, layout, steps)
        activations, is_kept = kept_activations(settings, measure) if is_alone else (measure(), False)
        fields.update(activations=activations.peak, graphs=activations.graphs, measured="before" if is_kept else "now")
    return MemoryProfile(free=free, activations=activations.peak, graphs=activations.graphs, **sizes)


def _settings(plan: LoadPlan, decoder: Decoder, layout: KvLayout, steps: LargestSteps) -> dict[str, object]:
    """All that the memory of the largest steps depends on, besides our code."""
    return {
        **asdict(steps),
        **asdict(layout),
        "dtype_of_weights": str(decoder.dtype),
        "max_model_len": decoder.max_model_len,
        "kernels": asdict(decoder.kernels),
        "device": [torch.cuda.get_device_name(plan.device), CudaMemory(plan.device).total(), torch.version.cuda],
        "libraries": [_version_of(name) for name in ("torch", "triton")],
        "allocations": [variable(name) for name in _ALLOCATION_VARIABLES],
    }


def _version_of(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
