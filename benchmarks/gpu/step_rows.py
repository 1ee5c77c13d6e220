"""Rows of complete decode steps of the engine, with scheduling and sampling: the share of time the GPU idles."""

from __future__ import annotations

import time
from itertools import pairwise

import torch

from benchmarks.gpu.engine import Engine, make_engine, make_job
from benchmarks.gpu.rows import Measured
from benchmarks.gpu.setting import DTYPE, Setting
from kernels.bench.inputs import BLOCK_SIZE
from kernels.bench.work import decoder_work
from pdserve.engine.device_runner import DeviceRunner
from pdserve.engine.graph_shapes import GraphShapes, decode_shape
from pdserve.engine.runner import ReportLayers, Results
from pdserve.engine.step import StepPlan
from pdserve.engine.stepper import Stepper
from pdserve.model.batch import Batch

#: Number of first decode steps that are not counted, because they capture a graph.
_WARM_UP = 4
#: Cycles for which the GPU waits before a step that is timed alone, while the host launches it: about 20 ms.
_HEAD_START_CYCLES = 40_000_000
#: No ITL budget: prompts are not delayed by sequences that already decode.
_NO_BUDGET_S = 1e9


def idle_share(setting: Setting, batch: int) -> Measured:
    """Compares the time from step to step on the GPU with the time of a step alone, for `batch` sequences.

    A step that the GPU starts while the host still launches it would seem to keep the GPU busy that long. So the time
    of a step alone comes from further steps, which wait on a busy GPU until they are launched.
    """
    sizes = setting.sizes
    num_passing = _WARM_UP + sizes.repeats + 1
    num_steps = num_passing + sizes.repeats
    # While the last prompts are computed, the first sequences decode.
    output_tokens = num_steps + -(-batch * sizes.step_context // sizes.prefill_tokens) + 2
    length = sizes.step_context + output_tokens
    engine = make_engine(
        setting,
        batch=batch,
        length=length,
        max_prompt_tokens=sizes.prefill_tokens,
        itl_budget_s=_NO_BUDGET_S,
        graphs=GraphShapes(at_start=(decode_shape(batch, -(-length // BLOCK_SIZE)),)),
    )
    runner = _TimedRunner(engine, setting, num_passing)
    for index in range(batch):
        engine.scheduler.reserve(make_job(setting, index, sizes.step_context, output_tokens))
    stepper = Stepper(engine.scheduler, runner, lambda output: None)
    while engine.scheduler.has_work():
        stepper.step(lambda: True)
    setting.clock.synchronize()
    passing, queued = runner.decoding[_WARM_UP:num_passing], runner.decoding[num_passing:num_steps]
    weight_bytes = setting.decoder(deterministic=True).weight_bytes
    return Measured(
        samples_ms=tuple(start.until(following) for (start, _), (following, _) in pairwise(passing)),
        against_ms=tuple(start.until(end) for start, end in queued),
        work=decoder_work(setting.shape, [(1, sizes.step_context)] * batch, DTYPE.itemsize, weight_bytes),
        how="CUDA graph" if setting.has_graphs else "launched one by one",
    )


class _Timestamp:
    """The time at which the GPU reaches this point of its stream; without a GPU, the host's time."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def until(self, later: _Timestamp) -> float:
        """Milliseconds until `later`."""
        if self._event is None or later._event is None:
            return (later._at - self._at) * 1e3
        return float(self._event.elapsed_time(later._event))


class _TimedRunner(DeviceRunner):
    """Records start and end, on the GPU, of the steps that only decode; the first of them run as in service."""

    def __init__(self, engine: Engine, setting: Setting, num_passing: int) -> None:
        """From decode step `num_passing` on, the GPU waits before each."""
        from pdserve.engine.device_sampler import DeviceSampler

        super().__init__(engine.decoder, engine.kv_cache, DeviceSampler(setting.device))
        self._device = setting.device
        self._num_passing = num_passing
        self.decoding: list[tuple[_Timestamp, _Timestamp]] = []

    def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
        only_decodes = bool(plan.decoding) and not plan.chunks
        if only_decodes and len(self.decoding) >= self._num_passing and self._device.type == "cuda":
            torch.cuda._sleep(_HEAD_START_CYCLES)
        start = _Timestamp(self._device)
        results = super().launch(plan, batch, report_layers)
        if only_decodes:
            self.decoding.append((start, _Timestamp(self._device)))
        return results
