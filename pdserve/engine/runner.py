"""Owns what a step computes with: the decoder, the KV cache and the sampler."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pdserve.engine.batching import build_batch, logits_rows_of
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import SampleResult
from pdserve.engine.step import StepPlan
from pdserve.model.batch import Batch


class Decoder(Protocol):
    """The model, as far as the engine knows it."""

    def forward(self, batch: Batch, kv_cache: Tensor) -> Tensor:
        """Write the K and V of all rows to their slots; logits of the wanted rows, float32 [num_logits, vocab]."""


class Runner:
    """Executes plans. Used on the step thread only."""

    def __init__(self, decoder: Decoder, kv_cache: KvCache, sampler: Sampler) -> None:
        self.kv_cache = kv_cache
        self._decoder = decoder
        self._sampler = sampler

    def build(self, plan: StepPlan) -> Batch | None:
        """The model's input; None when the plan has nothing to compute."""
        if not plan.chunks:
            return None
        return build_batch(plan, self.kv_cache.layout.block_size, self.kv_cache.tensor.device)

    def forward(self, plan: StepPlan, batch: Batch | None) -> Tensor | None:
        """Copy blocks first (copy-on-write), then compute: logits float32 [num_logits, vocab]."""
        self.kv_cache.copy_blocks(plan.copies)
        return None if batch is None else self._decoder.forward(batch, self.kv_cache.tensor)

    def sample(self, plan: StepPlan, logits: Tensor | None) -> list[SampleResult]:
        """One result for each `SampleRow` of the plan, in order."""
        rows = [row for chunk in plan.chunks for row in chunk.samples]
        if logits is None or not rows:
            return []
        return self._sampler.sample(logits, rows, logits_rows_of(plan))
