"""Owns what a step computes with: the decoder, the KV cache and the sampler."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial
from typing import Protocol

from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.base.device_event import DeviceEvent
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import SamplingParams
from pdserve.engine.batching import BatchBuilder
from pdserve.engine.sequence import SampleResult, SampleRow
from pdserve.engine.step import LayersWritten, StepPlan
from pdserve.model.batch import Batch

#: Waits until a step has ended, and returns a result for each of its samples, in order. To be called once.
Results = Callable[[], list[SampleResult]]


ReportLayers = Callable[[LayersWritten], None]


class StepCache(Protocol):
    """`pdserve.engine.kv_cache.KvCache`, or that of a rank whom others follow."""

    @property
    def tensor(self) -> Tensor:
        """As `KvCache.tensor`."""

    @property
    def layout(self) -> KvLayout:
        """Of the tensor."""

    def copy_blocks(self, pairs: Items[tuple[BlockId, BlockId]]) -> None:
        """Copies each source block onto its destination, in order."""

    def record_event(self, num_layers: int) -> DeviceEvent | None:
        """When that many layers of what is being launched will be written; None: they are."""


class StepDecoder(Protocol):
    """The model, as far as the engine knows it."""

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        """Write the K and V of all rows to their slots; logits of the wanted rows, float32 [num_logits, vocab].

        `on_layer` is told after each layer, or never.
        """


class TokenSampler(Protocol):
    """`pdserve.engine.sampler.Sampler`, or its counterpart on a device."""

    def sample(self, logits: Tensor, rows: Items[SampleRow], logits_rows: Items[int]) -> list[SampleResult]:
        """One result per row, in order; row i is drawn from `logits[logits_rows[i]]`. The step has ended then."""

    def wait_for_step(self) -> None:
        """Returns when the step has ended: its K and V, and blocks that were copied, are in their place."""


class Runner:
    """Executes plans. Used on the step thread only."""

    #: `launch` returns while the step is computed, and another can be launched behind it.
    overlaps = False

    def __init__(self, decoder: StepDecoder, kv_cache: StepCache, sampler: TokenSampler) -> None:
        self.kv_cache = kv_cache
        self._decoder = decoder
        self._sampler = sampler
        self._batches = BatchBuilder(kv_cache.layout.block_size)

    def build(self, plan: StepPlan) -> Batch | None:
        """The model's input, valid until the next call; None when the plan has nothing to compute."""
        return self._batches.build(plan) if plan.decoding or plan.chunks else None

    def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
        """Begin the step. Its result is to be taken before the next but one is launched, in the order of launches.

        The plan's reports are told on the way, if the decoder says how far it is.
        """
        return partial(self.sample, plan, self.forward(plan, batch, report_layers))

    def forward(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Tensor | None:
        """Copy blocks first (copy-on-write), then compute: logits float32 [num_logits, vocab]."""
        on_layer = self._prepare(plan, report_layers)
        return None if batch is None else self._decoder.forward(batch, self.kv_cache.tensor, on_layer)

    def _prepare(self, plan: StepPlan, report_layers: ReportLayers | None) -> LayerListener | None:
        """Copies the plan's blocks; whom the decoder is to tell of its layers, None: nobody wants to hear."""
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
        """Computes a batch and draws a token, for the sake of what is set up at first use."""
        row = SampleRow(params=SamplingParams(), choice_index=0, tokens=array("q", [0]), num_prompt=1)
        self._sampler.sample(self._decoder.forward(batch, self.kv_cache.tensor), [row], [0])

    def sample(self, plan: StepPlan, logits: Tensor | None) -> list[SampleResult]:
        """One result for each decoding sequence and then for each of the chunks' samples, in order."""
        rows, logits_rows = plan.sample_rows()
        if rows and logits is not None:
            return self._sampler.sample(logits, rows, logits_rows)
        self._sampler.wait_for_step()
        return []
