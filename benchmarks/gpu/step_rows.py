"""Rows of complete decode steps of the engine, with scheduling and sampling: the share of time the GPU idles."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from benchmarks.gpu.rows import Measured
from benchmarks.gpu.setting import DTYPE, Setting
from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from kernels.bench.inputs import BLOCK_SIZE
from kernels.bench.work import decoder_work
from kernels.decoder import DecoderKernel, LayerListener
from pdserve.base.ids import RequestId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.device_runner import DeviceRunner
from pdserve.engine.graph_shapes import GraphShapes, decode_shape
from pdserve.engine.graphs import CudaRecorder, DeviceDecoder, GraphConfig
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import ReportLayers, Results
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.engine.step import StepPlan
from pdserve.engine.stepper import Stepper
from pdserve.model.batch import Batch

if TYPE_CHECKING:
    from pdserve.engine.device_sampler import DeviceSampler

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
    scheduler, runner = _engine(setting, batch, sizes.step_context + output_tokens, num_passing)
    for index in range(batch):
        scheduler.reserve(_job(setting, index, output_tokens))
    stepper = Stepper(scheduler, runner, lambda output: None)
    while scheduler.has_work():
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


def _engine(setting: Setting, batch: int, length: int, num_passing: int) -> tuple[DecodeScheduler, _TimedRunner]:
    """A scheduler for `batch` sequences of `length` tokens, and its runner in deterministic mode."""
    from pdserve.engine.device_sampler import DeviceSampler

    shape, max_blocks = setting.shape, -(-length // BLOCK_SIZE)
    pool = BlockPool(batch * (max_blocks + 1), BLOCK_SIZE)
    limits = SequenceLimits(max_model_len=length + 1, vocab_size=shape.vocab_size)
    config = DecodeSchedulerConfig(
        limits=limits,
        max_num_seqs=batch,
        max_num_batched_tokens=setting.sizes.prefill_tokens,
        itl_budget_s=_NO_BUDGET_S,
    )
    layout = KvLayout.uniform(
        model="random",
        dtype=str(DTYPE).removeprefix("torch."),
        block_size=BLOCK_SIZE,
        num_layers=len(shape.windows),
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    graphs = None
    if setting.has_graphs:
        graphs = GraphConfig(
            recorder=CudaRecorder(),
            shapes=GraphShapes(at_start=(decode_shape(batch, max_blocks),)),
            vocab_size=shape.vocab_size,
        )
    decoder = DeviceDecoder(_Kernel(setting.decoder(deterministic=True)), setting.device, graphs)
    kv_cache = KvCache(layout, pool.num_blocks, setting.device)
    decoder.record_next(kv_cache.tensor, is_idle=False)
    runner = _TimedRunner(decoder, kv_cache, DeviceSampler(setting.device), num_passing)
    return DecodeScheduler(pool, config), runner


def _job(setting: Setting, index: int, output_tokens: int) -> DecodeJob:
    vocab_size = setting.shape.vocab_size
    return DecodeJob(
        request_id=RequestId(f"r{index:03}"),
        prompt_token_ids=[(index * 31 + position) % vocab_size for position in range(setting.sizes.step_context)],
        params=SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True),
        hash_key=index.to_bytes(32, "big"),  # No two sequences share a prefix.
        local_prefill_threshold=2**32 - 1,
    )


class _Kernel:
    """Adapter of a decoder's kernel to the engine's interface."""

    def __init__(self, kernel: DecoderKernel) -> None:
        self._kernel = kernel

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        return self._kernel.forward(batch.token_ids, batch.kv_rows(), batch.logits_rows, kv_cache)


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

    def __init__(self, decoder: DeviceDecoder, kv_cache: KvCache, sampler: DeviceSampler, num_passing: int) -> None:
        """From decode step `num_passing` on, the GPU waits before each."""
        super().__init__(decoder, kv_cache, sampler)
        self._device = kv_cache.tensor.device
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
