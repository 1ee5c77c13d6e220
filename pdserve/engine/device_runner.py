"""Runs steps on a device without waiting for them: the next one is launched while the current one is computed.

All steps run in one stream. So a step sees all writes of earlier ones, and may overwrite what they read.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from functools import partial
from typing import Protocol

from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.engine.mask_threads import sampled_but
from pdserve.engine.runner import ReportLayers, Results, Runner, StepCache, TokenSampler
from pdserve.engine.sequence import SampleResult, SampleRow
from pdserve.engine.step import StepPlan
from pdserve.model.batch import Batch


class NonBlockingDecoder(Protocol):
    """`pdserve.engine.graphs.DeviceDecoder`: calls return before the device has finished."""

    def forward(
        self,
        batch: Batch,
        kv_cache: Tensor,
        on_layer: LayerListener | None = None,
        *,
        token_ids: Tensor | None = None,
    ) -> Tensor:
        """As `StepDecoder.forward`. `token_ids`, on the device, replace those of the batch; -1 is a failed sample."""


class PendingSamples(Protocol):
    """`pdserve.engine.device_sampler.DeviceSamples`: tokens that are being sampled."""

    @property
    def token_ids(self) -> Tensor:
        """Tokens on the device: int64 [num_rows], -1 for a row that failed."""

    def results(self) -> list[SampleResult]:
        """One result per row. Waits until the step has ended."""


class NonBlockingSampler(TokenSampler, Protocol):
    """`pdserve.engine.device_sampler.DeviceSampler`."""

    def launch(
        self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int], *, is_ahead: bool = False
    ) -> PendingSamples:
        """As `sample`, without waiting. `is_ahead`: sample one token beyond the next one of each row."""


class DeviceRunner(Runner):
    """A `Runner` with at most two steps in flight."""

    overlaps = True
    _decoder: NonBlockingDecoder
    _sampler: NonBlockingSampler

    def __init__(self, decoder: NonBlockingDecoder, kv_cache: StepCache, sampler: NonBlockingSampler) -> None:
        super().__init__(decoder, kv_cache, sampler)
        #: Tokens of the step launched last, in the order of its rows.
        self._token_ids: Tensor | None = None

    def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
        """As `Runner.launch`. A step planned ahead takes its tokens from the step before, on the device."""
        rows, logits_rows = plan.sample_rows()
        if batch is None or not rows:
            return super().launch(plan, batch, report_layers)
        self._masks.start(plan)
        on_layer = self._prepare(plan, report_layers)
        token_ids = self._token_ids if plan.is_ahead else None
        logits = self._decoder.forward(batch, self.kv_cache.tensor, on_layer, token_ids=token_ids)
        if late := self._masks.late():
            self._sampler.wait_for_step()
            results = sampled_but(late, rows, logits_rows, partial(self._sampler.sample, logits))
            return lambda: results
        samples = self._sampler.launch(logits, rows, logits_rows, is_ahead=plan.is_ahead)
        self._token_ids = samples.token_ids
        return samples.results
