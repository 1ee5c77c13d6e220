"""From a model directory to one rank's shard: its part of the decoder, and KV blocks with its heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.choice import Backend, KernelOptions
from kernels.cpu.decoder import Borrowing
from kernels.decoder import ALONE, Ranks
from kernels.split import even_slice
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.engine.cpu_sampler import CpuSampler
from pdserve.engine.graph_shapes import plan_graphs
from pdserve.engine.graphs import CudaRecorder, DeviceDecoder, GraphConfig
from pdserve.engine.job import MAX_SCORED_TOKENS
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.sampler import Sampler
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.kv_scales import read_kv_scales, scales_digest
from pdserve.model.loader import load_decoder, load_weights, make_decoder, memory_of_weights
from pdserve.worker.config import FP8_KV, WorkerConfig
from pdserve.worker.load.cores import num_cores
from pdserve.worker.load.device_kv_budget import plan_device_kv
from pdserve.worker.load.kv_budget import KvBudget, KvRequest, plan_kv
from pdserve.worker.load.memory_profile import (
    CudaMemory,
    LargestSteps,
    MemoryBefore,
    MemoryProfile,
    await_free_memory,
    profile_memory,
)

if TYPE_CHECKING:
    from pdserve.engine.device_sampler import DeviceSampler

log = get_logger(__name__)

#: Number of prompts whose last tokens one step can compute, as far as memory is set aside for their logits.
_MAX_PROMPTS = 64

#: Reduces the budgets of all ranks to the one that is possible on each.
Agree = Callable[[KvBudget], KvBudget]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """One rank's share of a model; the whole model if there is one rank."""

    #: Layout of blocks with all heads, which is how they are handed over.
    layout: KvLayout
    config: ModelConfig
    decoder: Decoder
    #: The decoder as steps call it.
    step_decoder: Decoder | DeviceDecoder
    #: Blocks with this rank's heads.
    kv_cache: KvCache

    def record_next(self, is_idle: bool) -> bool:
        """Records one more graph, as `pdserve.engine.runner.RecordNext`."""
        decoder = self.step_decoder
        return isinstance(decoder, DeviceDecoder) and decoder.record_next(self.kv_cache.tensor, is_idle=is_idle)

    def close(self) -> None:
        """Frees the CUDA graphs, without which the ranks' group cannot end. The last step must have ended."""
        if isinstance(self.step_decoder, DeviceDecoder):
            self.step_decoder.drop_graphs()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The settings of one load, and the values derived from them."""

    config: WorkerConfig
    model: ModelConfig
    options: KernelOptions
    device: torch.device
    ranks: Ranks
    agree: Agree
    #: Digest of the scales of an fp8 cache: those of the whole model, not of the rank.
    scales: str | None

    @property
    def kv_request(self) -> KvRequest:
        """The requested size of the KV cache."""
        return KvRequest(
            memory_bytes=self.config.kv_cache_memory,
            max_model_len=self.config.max_model_len,
            model_limit=self.model.max_context,
            model_default=self.model.default_context,
        )

    def layout(self, max_model_len: int | None) -> KvLayout:
        """Layout of blocks with all heads. Where rotations depend on the served length, it names that length."""
        # Rounded weights make another model, whose blocks must not be mixed with those of the original. The same holds
        # for blocks of an fp8 cache that were computed with other activations, or have other scales.
        config, model = self.config, self.model
        fingerprints, dtype = [fingerprint(config.model_dir), config.quantization], config.dtype
        if self.scales is not None:
            computed = model.dtype if dtype == "auto" else dtype
            fingerprints, dtype = [*fingerprints, computed, f"kv-scales-{self.scales}"], FP8_KV
        return model.kv_layout(
            fingerprint="/".join(filter(None, fingerprints)),
            dtype=dtype,
            block_size=config.block_size,
            max_model_len=max_model_len,
        )

    def rank_layout(self, max_model_len: int | None) -> KvLayout:
        """Layout of blocks with one rank's heads."""
        return self.layout(max_model_len).with_heads_divided(self.ranks.size)

    def replays(self, decoder: Decoder) -> bool:
        """Whether decode steps are replayed from CUDA graphs. Plain torch synchronizes, which cannot be captured."""
        config = self.config
        return bool(config.max_decoding) and not config.enforce_eager and decoder.kernels.backend is Backend.TRITON


def load_shard(
    config: WorkerConfig,
    device: torch.device,
    *,
    ranks: Ranks = ALONE,
    agree: Agree = lambda budget: budget,
    group_bytes: int = 0,
    borrowing: Borrowing | None = None,
) -> ModelShard:
    """Reads weights, allocates the KV cache. Blocks for some seconds. Raises `SetupError` with the numbers.

    All ranks call it with the same config, except for cores and device. `group_bytes`: GPU memory that communication
    between ranks has taken.
    """
    plan = _plan(config, device, ranks, agree, borrowing)
    decoder, budget = _load_on_cpu(plan) if device.type == "cpu" else _load_on_gpu(plan, group_bytes)
    return ModelShard(
        layout=plan.layout(budget.max_model_len),
        config=plan.model,
        decoder=decoder,
        step_decoder=_step_decoder(plan, decoder),
        kv_cache=KvCache(
            plan.rank_layout(budget.max_model_len), budget.num_blocks, device, is_shared=config.uses_local_sockets
        ),
    )


def _plan(
    config: WorkerConfig, device: torch.device, ranks: Ranks, agree: Agree, borrowing: Borrowing | None
) -> LoadPlan:
    model = ModelConfig.from_dir(config.model_dir)
    scales = read_kv_scales(config.model_dir, model) if config.kv_cache_dtype == FP8_KV else None
    options = KernelOptions(
        backend=None if config.kernels == "auto" else Backend(config.kernels),
        instruction_set=config.instruction_set,
        num_threads=config.threads or len(config.cpus) or num_cores(),
        cpus=config.cpus,
        borrowing=borrowing,
        quantization=config.quantization,
        deterministic=config.deterministic,
        kv_scales=None if scales is None else _rank_scales(scales, ranks),
    )
    return LoadPlan(
        config=config,
        model=model,
        options=options,
        device=device,
        ranks=ranks,
        agree=agree,
        scales=None if scales is None else scales_digest(scales),
    )


def _rank_scales(scales: Tensor, ranks: Ranks) -> Tensor:
    """Scales of the rank's heads: float32 [num_layers, 2, num_kv_heads / ranks]."""
    return scales.chunk(ranks.size, dim=2)[ranks.rank].contiguous()


def open_sampler(decoder: Decoder) -> Sampler | CpuSampler | DeviceSampler:
    """A sampler that runs where the decoder's logits are, on the decoder's threads if it has any."""
    if decoder.device.type == "cpu":
        return Sampler() if decoder.row_sampler is None else CpuSampler(decoder.row_sampler)
    # Imported on use: Triton takes a second.
    from pdserve.engine.device_sampler import DeviceSampler

    return DeviceSampler(decoder.device)


def _load_on_cpu(plan: LoadPlan) -> tuple[Decoder, KvBudget]:
    config, model = plan.config, plan.model
    weight_bytes = memory_of_weights(model, dtype=config.dtype, kernels=plan.options, ranks=plan.ranks)
    # Ranks on CPUs share one memory, so blocks with all heads have to fit.
    budget = plan.agree(plan_kv(plan.layout(config.max_model_len), plan.kv_request, weight_bytes=weight_bytes))
    decoder = load_decoder(
        config.model_dir,
        dtype=config.dtype,
        max_model_len=budget.max_model_len,
        kernels=plan.options,
        device=str(plan.device),
        ranks=plan.ranks,
    )
    return decoder, budget


def _load_on_gpu(plan: LoadPlan, group_bytes: int) -> tuple[Decoder, KvBudget]:
    config, model, options, ranks = plan.config, plan.model, plan.options, plan.ranks
    memory = CudaMemory(plan.device)
    needed = int(memory.total() * config.gpu_memory_utilization) - group_bytes
    before = MemoryBefore(free=await_free_memory(memory, needed) + group_bytes, group=group_bytes)
    weights = load_weights(
        config.model_dir, model, dtype=config.dtype, device=str(plan.device), rank=ranks.rank, size=ranks.size
    )
    longest = min(config.max_model_len or model.default_context, model.max_context)
    decoder = make_decoder(model, weights, max_model_len=longest, kernels=options, ranks=ranks)
    budget = plan_device_kv(
        plan.rank_layout(longest),
        _profile(plan, decoder, before),
        plan.kv_request,
        utilization=config.gpu_memory_utilization,
        num_ranks=ranks.size,
        staging_bytes=config.staging_memory if config.handover_memory == "device" else 0,
    )
    budget = plan.agree(budget)
    # The decoder is made again: the length that can be served may have become shorter.
    decoder = make_decoder(model, weights, max_model_len=budget.max_model_len, kernels=options, ranks=ranks)
    return decoder, budget


def _profile(plan: LoadPlan, decoder: Decoder, before: MemoryBefore) -> MemoryProfile:
    config = plan.config
    profile = profile_memory(
        decoder,
        open_sampler(decoder) if plan.ranks.rank == 0 else None,
        plan.rank_layout(decoder.max_model_len),
        CudaMemory(plan.device),
        before=before,
        steps=LargestSteps(
            num_tokens=config.max_prompt_tokens,
            num_logits=min(config.max_prompt_tokens, _MAX_PROMPTS + MAX_SCORED_TOKENS),
            num_decoding=config.max_decoding,
            replayed=plan.replays(decoder),
        ),
    )
    log.info(
        "gpu_memory",
        device=str(plan.device),
        total=profile.total,
        weights=profile.weights,
        activations=profile.activations,
        graphs=profile.graphs,
        group=profile.group,
    )
    return profile


def _step_decoder(plan: LoadPlan, decoder: Decoder) -> Decoder | DeviceDecoder:
    if plan.device.type == "cpu":
        return decoder
    if not plan.replays(decoder):
        return DeviceDecoder(decoder, plan.device)
    vocab, ranks = decoder.config.vocab_size, plan.ranks
    graphs = GraphConfig(
        recorder=CudaRecorder(),
        shapes=plan_graphs(
            max(1, plan.config.max_decoding),
            -(-decoder.max_model_len // plan.config.block_size),
            # Windows bound the splits of the fast mode, whose size follows from the width.
            any_width=not plan.config.deterministic and not any(plan.model.layer_windows),
        ),
        # Only rank 0 receives the other ranks' columns.
        vocab_size=vocab if ranks.rank == 0 else len(range(vocab)[even_slice(vocab, ranks.rank, ranks.size)]),
    )
    return DeviceDecoder(decoder, plan.device, graphs)
