"""The settings of one load of a model, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.choice import Backend, KernelOptions
from kernels.cpu.decoder import Borrowing
from kernels.decoder import Ranks
from pdserve.base.layout import KvLayout
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.kv_scales import read_kv_scales, scales_digest
from pdserve.worker.config import FP8_KV, WorkerConfig
from pdserve.worker.load.cores import num_cores
from pdserve.worker.load.kv_budget import KvBudget, KvRequest

#: Reduces the budgets of all ranks to the one that is possible on each.
Agree = Callable[[KvBudget], KvBudget]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The settings of one load, and the values derived from them."""

    config: WorkerConfig
    model: ModelConfig
    options: KernelOptions
    device: torch.device
    ranks: Ranks
    agree: Agree
    #: That of the model directory.
    fingerprint: str
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
        fingerprints, dtype = [self.fingerprint, config.quantization], config.dtype
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


def make_plan(
    config: WorkerConfig, device: torch.device, ranks: Ranks, agree: Agree, borrowing: Borrowing | None
) -> LoadPlan:
    """Reads the model's config, scales of its KV cache, and all its weights if no digest of them is kept.

    Raises `SetupError`.
    """
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
        fingerprint=fingerprint(config.model_dir),
        scales=None if scales is None else scales_digest(scales),
    )


def _rank_scales(scales: Tensor, ranks: Ranks) -> Tensor:
    """Scales of the rank's heads: float32 [num_layers, 2, num_kv_heads / ranks]."""
    return scales.chunk(ranks.size, dim=2)[ranks.rank].contiguous()
