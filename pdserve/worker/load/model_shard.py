"""From a model directory to what one rank computes with: its part of the decoder, and KV blocks of its heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.choice import Backend, KernelOptions
from kernels.cpu.decoder import Borrowing
from kernels.decoder import ALONE, Ranks
from kernels.split import even_slice
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.engine.graphs import CudaRecorder, DeviceDecoder, GraphConfig
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import TokenSampler
from pdserve.engine.sampler import Sampler
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.kv_scales import read_kv_scales, scales_digest
from pdserve.model.loader import load_decoder, load_weights, make_decoder, memory_of_weights
from pdserve.worker.config import FP8_KV, WorkerConfig
from pdserve.worker.load.device import CudaMemory, LargestSteps, measure_use
from pdserve.worker.load.device_kv_budget import plan_device_kv
from pdserve.worker.load.kv_budget import KvBudget, plan_kv

if TYPE_CHECKING:
    from pdserve.engine.device_sampler import DeviceSampler

log = get_logger(__name__)

#: Of which one step can compute the last token, as far as memory is set aside for it.
_MOST_PROMPTS = 64

#: Makes what each rank found possible into what is possible for all.
Agree = Callable[[KvBudget], KvBudget]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShard:
    """Of one rank the whole model."""

    #: Of blocks with all heads, as they are handed over.
    layout: KvLayout
    config: ModelConfig
    decoder: Decoder
    #: The same, as steps use it.
    step_decoder: Decoder | DeviceDecoder
    #: Of this rank's heads.
    kv_cache: KvCache

    def close(self) -> None:
        """Lets go of what the ranks' group cannot end with. No step is computed any more."""
        if isinstance(self.step_decoder, DeviceDecoder):
            self.step_decoder.drop_graphs()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What is to be loaded, wherever it is."""

    config: WorkerConfig
    model: ModelConfig
    options: KernelOptions
    device: torch.device
    ranks: Ranks
    agree: Agree
    #: Of an fp8 cache: the digest of its scales, which is the model's, not the rank's.
    scales: str | None

    def layout(self, max_model_len: int | None) -> KvLayout:
        """Of blocks with all heads. Some models rotate by the length that is served: the layout names it."""
        # Rounded weights make another model: its blocks must not be mixed with those of the original. Nor must blocks
        # of an fp8 cache that was computed with other activations, or has other scales.
        config, model = self.config, self.model
        parts, dtype = [fingerprint(config.model_dir), config.quantization], config.dtype
        if self.scales is not None:
            computed = model.dtype if dtype == "auto" else dtype
            parts, dtype = [*parts, computed, f"kv-scales-{self.scales}"], FP8_KV
        return model.kv_layout(
            fingerprint="/".join(filter(None, parts)),
            dtype=dtype,
            block_size=config.block_size,
            max_model_len=max_model_len,
        )


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

    All ranks call it with the same config, but for cores and device. `group_bytes`: of the GPU's memory, for what they
    say to each other.
    """
    model = ModelConfig.from_dir(config.model_dir)
    scales = read_kv_scales(config.model_dir, model) if config.kv_cache_dtype == FP8_KV else None
    options = KernelOptions(
        backend=None if config.kernels == "auto" else Backend(config.kernels),
        instruction_set=config.instruction_set,
        num_threads=config.threads,
        cpus=config.cpus,
        borrowing=borrowing,
        quantization=config.quantization,
        deterministic=config.deterministic,
        kv_scales=None if scales is None else _of_heads(scales, ranks),
    )
    order = LoadPlan(
        config=config,
        model=model,
        options=options,
        device=device,
        ranks=ranks,
        agree=agree,
        scales=None if scales is None else scales_digest(scales),
    )
    decoder, budget = _load_on_cpu(order) if device.type == "cpu" else _load_on_gpu(order, group_bytes)
    layout = order.layout(budget.max_model_len)
    return ModelShard(
        layout=layout,
        config=model,
        decoder=decoder,
        step_decoder=_step_decoder(config, decoder, layout, device, ranks),
        kv_cache=KvCache(_of_rank(layout, ranks.size), budget.num_blocks, device),
    )


def _of_heads(scales: Tensor, ranks: Ranks) -> Tensor:
    return scales.chunk(ranks.size, dim=2)[ranks.rank].contiguous()


def open_sampler(device: torch.device) -> Sampler | DeviceSampler:
    """What draws tokens where the logits are."""
    if device.type == "cpu":
        return Sampler()
    # Only where it is used: Triton takes a second to import.
    from pdserve.engine.device_sampler import DeviceSampler

    return DeviceSampler(device)


def _load_on_cpu(order: LoadPlan) -> tuple[Decoder, KvBudget]:
    config, model, options, ranks = order.config, order.model, order.options, order.ranks
    # Ranks on CPUs share one memory: blocks of all heads are what has to fit.
    budget = order.agree(
        plan_kv(
            order.layout(config.max_model_len),
            weight_bytes=memory_of_weights(model, dtype=config.dtype, kernels=options, ranks=ranks),
            kv_cache_memory=config.kv_cache_memory,
            wanted_model_len=config.max_model_len,
            model_limit=model.max_position_embeddings,
        )
    )
    decoder = load_decoder(
        config.model_dir,
        dtype=config.dtype,
        max_model_len=budget.max_model_len,
        kernels=options,
        device=str(order.device),
        ranks=ranks,
    )
    return decoder, budget


def _load_on_gpu(order: LoadPlan, group_bytes: int) -> tuple[Decoder, KvBudget]:
    config, model, options, ranks, device = order.config, order.model, order.options, order.ranks, order.device
    memory = CudaMemory(device)
    free_before = memory.free() + group_bytes
    weights = load_weights(
        config.model_dir, model, dtype=config.dtype, device=str(device), rank=ranks.rank, size=ranks.size
    )
    longest = min(config.max_model_len or model.max_position_embeddings, model.max_position_embeddings)
    layout = _of_rank(order.layout(longest), ranks.size)
    decoder = make_decoder(model, weights, max_model_len=longest, kernels=options, ranks=ranks)
    use = measure_use(
        decoder,
        _drawing(device, ranks),
        layout,
        memory,
        free_before=free_before,
        group_bytes=group_bytes,
        steps=LargestSteps(
            num_tokens=config.max_num_batched_tokens,
            num_prompts=min(config.max_num_batched_tokens, _MOST_PROMPTS),
            num_decoding=config.max_decoding,
            replayed=_captures(config, decoder),
        ),
    )
    budget = plan_device_kv(
        layout,
        use,
        utilization=config.gpu_memory_utilization,
        kv_cache_memory=config.kv_cache_memory,
        num_ranks=ranks.size,
        wanted_model_len=config.max_model_len,
        model_limit=model.max_position_embeddings,
        staging=config.staging_memory if config.handover_memory == "device" else 0,
    )
    log.info(
        "gpu_memory",
        device=str(device),
        total=use.total,
        weights=use.weights,
        activations=use.activations,
        graphs=use.graphs,
        group=use.group,
    )
    budget = order.agree(budget)
    # Bound once more: what can be served may have become shorter.
    decoder = make_decoder(model, weights, max_model_len=budget.max_model_len, kernels=options, ranks=ranks)
    return decoder, budget


def _drawing(device: torch.device, ranks: Ranks) -> TokenSampler | None:
    return open_sampler(device) if ranks.rank == 0 else None


def _of_rank(layout: KvLayout, size: int) -> KvLayout:
    return replace(layout, num_kv_heads=layout.num_kv_heads // size)


def _captures(config: WorkerConfig, decoder: Decoder) -> bool:
    """Plain torch asks the device on its way, which cannot be captured."""
    return bool(config.max_decoding) and not config.enforce_eager and decoder.kernels.backend is Backend.TRITON


def _step_decoder(
    config: WorkerConfig, decoder: Decoder, layout: KvLayout, device: torch.device, ranks: Ranks
) -> Decoder | DeviceDecoder:
    if device.type == "cpu":
        return decoder
    if not _captures(config, decoder):
        return DeviceDecoder(decoder, device)
    vocab = decoder.config.vocab_size
    graphs = GraphConfig(
        recorder=CudaRecorder(),
        max_num_seqs=max(1, config.max_decoding),
        max_blocks=-(-decoder.max_model_len // layout.block_size),
        # Only rank 0 receives the other ranks' columns.
        vocab_size=vocab if ranks.rank == 0 else len(range(vocab)[even_slice(vocab, ranks.rank, ranks.size)]),
    )
    return DeviceDecoder(decoder, device, graphs)
