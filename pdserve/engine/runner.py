"""Runs the plans of steps with a decoder, a KV cache and a sampler."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kernels.decoder import Interrupt, LayerListener
from pdserve.base.device_event import DeviceEvent
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.base.logs import get_logger
from pdserve.base.sampling import SamplingParams
from pdserve.engine.batching import BatchBuilder
from pdserve.engine.mask_threads import MaskThreads, sampled_but
from pdserve.engine.sequence import SampleResult, SampleRow
from pdserve.engine.step import LayersWritten, StepPlan
from pdserve.model.batch import Batch

log = get_logger(__name__)

#: Waits until a step has ended, and returns a result for each of its samples, in order. To be called once.
Results = Callable[[], list[SampleResult]]
#: Records one more graph of decode steps; whether any was left. The argument is `is_idle` of `Runner.prepare`.
RecordNext = Callable[[bool], bool]
#: Receives the reports of a plan during its forward pass.
ReportLayers = Callable[[LayersWritten], None]


class StepCache(Protocol):
    """`pdserve.engine.kv_cache.KvCache`, or rank 0's, which also drives the caches of its followers."""

    @property
    def tensor(self) -> Tensor:
        """As `KvCache.tensor`."""

    @property
    def layout(self) -> KvLayout:
        """The tensor's layout."""

    def copy_blocks(self, pairs: Items[tuple[BlockId, BlockId]]) -> None:
        """Copy each source block to its destination, in order."""

    def record_event(self, num_layers: int) -> DeviceEvent | None:
        """An event after the first `num_layers` layers of the step being launched; None: they are written already."""


class StepDecoder(Protocol):
    """The forward pass: `pdserve.model.decoder.Decoder`, its counterpart on a device, or that of several ranks."""

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        """Write K and V of all rows to their slots. Returns the requested logits, float32 [num_logits, vocab].

        `on_layer` is called after each layer, or never. Raises `PassInterrupted`, if it has an interrupt.
        """


class TokenSampler(Protocol):
    """`pdserve.engine.sampler.Sampler`, or its counterpart on a device."""

    def sample(self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int]) -> list[SampleResult]:
        """One result per row, in order; row i is sampled from `logits[logits_rows[i]]`. Waits for the step's end."""

    def wait_for_step(self) -> None:
        """Return when the step has ended: its K and V are stored, and its blocks are copied."""


class Runner:
    """Executes plans. Used on the step thread only."""

    #: Whether `launch` returns while the step is computed, so that another one can be launched behind it.
    overlaps = False

    def __init__(
        self,
        decoder: StepDecoder,
        kv_cache: StepCache,
        sampler: TokenSampler,
        *,
        interrupt: Interrupt | None = None,
        record_next: RecordNext | None = None,
    ) -> None:
        """`interrupt` ends forward passes of the decoder; None: it runs every pass to its end.

        `record_next` None: no step is recorded.
        """
        self.kv_cache = kv_cache
        self.interrupt = interrupt
        self._decoder = decoder
        self._sampler = sampler
        self._batches = BatchBuilder(kv_cache.layout.block_size)
        self._masks = MaskThreads()
        self._record_next = record_next
        #: Everything that is needed at the start has been recorded.
        self._is_prepared = False

    def build(self, plan: StepPlan) -> Batch | None:
        """The model's input, valid until the next call; None for a plan without sequences."""
        return self._batches.build(plan) if plan.decoding or plan.chunks else None

    def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
        """Start the step. At most two steps may be in flight; collect their results in the order of launches.

        The plan's reports are sent during the launch, if the decoder calls back after each layer. Raises
        `PassInterrupted`.
        """
        self._masks.start(plan.sample_rows()[0])
        return partial(self.sample, plan, self.forward(plan, batch, report_layers))

    def settle(self) -> bool:
        """Launch what the last step still lacks. Whether another one can be launched behind it."""
        return self.overlaps

    def forward(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Tensor | None:
        """Copy blocks (copy-on-write), then run the forward pass: logits, float32 [num_logits, vocab].

        Of a plan that is pooled: hidden states, float32 [num_logits, hidden_size].
        """
        on_layer = self._prepare(plan, report_layers)
        return None if batch is None else self._decoder.forward(batch, self.kv_cache.tensor, on_layer)

    def _prepare(self, plan: StepPlan, report_layers: ReportLayers | None) -> LayerListener | None:
        """Copy the plan's blocks. Returns the listener that sends the plan's reports; None: there are none to send."""
        if plan.copies:
            self.kv_cache.copy_blocks(plan.copies)
        if report_layers is None or not plan.reports:
            return None
        due: defaultdict[int, list[LayersWritten]] = defaultdict(list)
        for report in plan.reports:
            due[report.num_layers].append(report)

        def on_layer(num_layers: int) -> None:
            if num_layers in due:
                event = self.kv_cache.record_event(num_layers)
                for report in due[num_layers]:
                    report_layers(replace(report, ready_event=event))

        return on_layer

    def try_out(self, batch: Batch) -> None:
        """Compute a batch and sample a token, to trigger all set-up at first use."""
        row = SampleRow(params=SamplingParams(), choice_index=0, tokens=array("q", [0]), num_prompt=1)
        self._sampler.sample(self._decoder.forward(batch, self.kv_cache.tensor), [row], [0])

    def prepare(self, *, is_idle: bool) -> bool:
        """Record one more kind of step, so that it takes less time; whether any was left. No step may be in flight.

        With `is_idle` also kinds that are not needed at the start, once those are recorded that are. Without memory for
        one, no more are recorded.
        """
        if self._record_next is None or (is_idle and not self._is_prepared):
            return False
        try:
            is_recorded = self._record_next(is_idle)
        except torch.OutOfMemoryError as error:
            log.warning("graphs_incomplete", exc=error, remedy="lower --gpu-memory-utilization")
            self._record_next = None
            return False
        self._is_prepared |= not is_recorded
        if is_idle and not is_recorded:
            self._record_next = None
        return is_recorded

    def sample(self, plan: StepPlan, logits: Tensor | None) -> list[SampleResult]:
        """One result for each decoding sequence and then for each of the chunks' samples, in order.

        `logits` of a plan that is pooled are hidden states, which are added where its chunks say.
        """
        if plan.is_pooled and logits is not None:
            self._sampler.wait_for_step()
            _pool(plan, logits)
            return []
        rows, logits_rows = plan.sample_rows()
        if rows and logits is not None:
            return sampled_but(self._masks.late(), rows, logits_rows, partial(self._sampler.sample, logits))
        self._sampler.wait_for_step()
        return []


def _pool(plan: StepPlan, hidden: Tensor) -> None:
    """Add the hidden states of a step, float32 [num_logits, hidden_size], to the sums of its chunks."""
    rows, first = hidden.cpu().numpy(), 0
    for chunk in plan.chunks:
        if chunk.pool is not None:
            chunk.pool.add(rows[first : first + len(chunk.pooled_rows)])
        first += chunk.num_logits
