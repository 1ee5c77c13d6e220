"""Runs steps on a device without waiting for them: the next one is launched while the current one is computed.

All steps run in one stream. So a step sees all writes of earlier ones, and may overwrite what they read.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.engine.device_rows import stand_in
from pdserve.engine.mask_threads import sampled_but
from pdserve.engine.runner import RecordNext, ReportLayers, Results, Runner, StepCache, TokenSampler
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


@dataclass(slots=True)
class _LastStep:
    """The step launched last, of which the device has everything but perhaps the sampling."""

    plan: StepPlan
    rows: list[SampleRow]
    logits_rows: list[int]
    #: None: sampling has been launched, and needs them no more on the host.
    logits: Tensor | None
    #: Waits for the sampled tokens; None: sampling is not launched yet.
    results: Results | None = None
    #: Tokens on the device, in the order of the rows; None: not of all rows.
    token_ids: Tensor | None = None


class DeviceRunner(Runner):
    """A `Runner` with at most two steps in flight.

    A step planned ahead takes its tokens from the step before, on the device. If what may follow them depends on them,
    as with a grammar, only its forward pass is launched ahead. It is sampled when they are known, and what may follow
    is found while the device computes the pass.
    """

    overlaps = True
    _decoder: NonBlockingDecoder
    _sampler: NonBlockingSampler

    def __init__(
        self,
        decoder: NonBlockingDecoder,
        kv_cache: StepCache,
        sampler: NonBlockingSampler,
        *,
        record_next: RecordNext | None = None,
    ) -> None:
        super().__init__(decoder, kv_cache, sampler, record_next=record_next)
        self._last: _LastStep | None = None

    def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
        """As `Runner.launch`."""
        rows, logits_rows = plan.sample_rows()
        before, self._last = self._last, None
        if batch is None or not rows:
            return super().launch(plan, batch, report_layers)
        follow = plan.is_ahead and any(row.follows_next for row in rows)
        if not follow:
            self._masks.start(rows)
        on_layer = self._prepare(plan, report_layers)
        token_ids = before.token_ids if plan.is_ahead and before is not None else None
        logits = self._decoder.forward(batch, self.kv_cache.tensor, on_layer, token_ids=token_ids)
        step = self._last = _LastStep(plan, rows, logits_rows, logits)
        if not follow:
            self._sample(step, rows, is_ahead=plan.is_ahead)
        return partial(self._results, step)

    def settle(self) -> bool:
        """As `Runner.settle`. Sampling that had to wait for the tokens of the step before can be launched now."""
        step = self._last
        if step is None:
            return False
        self._sample_later(step)
        return step.token_ids is not None

    def _results(self, step: _LastStep) -> list[SampleResult]:
        self._sample_later(step)
        assert step.results is not None
        return step.results()

    def _sample_later(self, step: _LastStep) -> None:
        """Samples with the tokens of the step before. Sequences that have ended with them have results for nobody."""
        if step.results is not None:
            return
        rows = [
            row if sequence.block_table else stand_in(row)
            for sequence, row in zip(step.plan.decoding, step.rows, strict=True)
        ]
        self._masks.start(rows)
        self._sample(step, rows, is_ahead=False)

    def _sample(self, step: _LastStep, rows: Items[SampleRow], *, is_ahead: bool) -> None:
        logits_rows = step.logits_rows
        logits, step.logits = step.logits, None
        assert logits is not None
        if self._masks.late():
            self._sampler.wait_for_step()
            # A mask may take as long as the pass, and a little longer.
            results = sampled_but(self._masks.late(), rows, logits_rows, partial(self._sampler.sample, logits))
            step.results = lambda: results
            return
        samples = self._sampler.launch(logits, rows, logits_rows, is_ahead=is_ahead)
        step.results, step.token_ids = samples.results, samples.token_ids
