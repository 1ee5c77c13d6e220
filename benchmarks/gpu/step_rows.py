"""Decode steps as the engine takes them, scheduled, sampled and told: how much of the time the GPU idles."""

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
from pdserve.engine.graphs import CudaRecorder, DeviceDecoder, GraphConfig
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import ReportLayers, Results
from pdserve.engine.sequence import SequenceLimits
from pdserve.engine.step import StepPlan
from pdserve.engine.stepper import Stepper
from pdserve.model.batch import Batch

if TYPE_CHECKING:
    from pdserve.engine.device_sampler import DeviceSampler

#: The first of the steps that decode, in which a graph is captured.
_WARM_UP = 4
#: For which the GPU waits before a step whose own time is taken, so that the host has launched it by then: some 20 ms.
_HEAD_START_CYCLES = 40_000_000
#: Prompts are not held up by sequences that decode already.
_NO_BUDGET_S = 1e9


def idle_share(setting: Setting, batch: int) -> Measured:
    """Of `batch` sequences: from the begin of a step on the GPU to that of the next, against the step itself.

    A step that the GPU begins while the host still launches it would seem busy for as long as that takes. So the step
    itself is that of further steps, each of which waits behind a busy GPU until it is launched.
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
        samples_ms=tuple(begin.until(following) for (begin, _), (following, _) in pairwise(passing)),
        against_ms=tuple(begin.until(end) for begin, end in queued),
        work=decoder_work(setting.shape, [(1, sizes.step_context)] * batch, DTYPE.itemsize, weight_bytes),
        how="CUDA graph" if setting.has_graphs else "launched one by one",
    )


def _engine(setting: Setting, batch: int, length: int, num_passing: int) -> tuple[DecodeScheduler, _Timed]:
    """A scheduler for `batch` sequences of `length` tokens, and what computes its steps, in deterministic mode."""
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
    layout = KvLayout(
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
            recorder=CudaRecorder(), max_num_seqs=batch, max_blocks=max_blocks, vocab_size=shape.vocab_size
        )
    decoder = DeviceDecoder(_Kernel(setting.decoder(deterministic=True)), setting.device, graphs)
    kv_cache = KvCache(layout, pool.num_blocks, setting.device)
    runner = _Timed(decoder, kv_cache, DeviceSampler(setting.device), num_passing)
    return DecodeScheduler(pool, config), runner


def _job(setting: Setting, index: int, output_tokens: int) -> DecodeJob:
    vocab_size = setting.shape.vocab_size
    return DecodeJob(
        request_id=RequestId(f"r{index:03}"),
        prompt_token_ids=[(index * 31 + place) % vocab_size for place in range(setting.sizes.step_context)],
        params=SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True),
        hash_key=index.to_bytes(32, "big"),  # no two share a prefix
        local_prefill_threshold=2**32 - 1,
    )


class _Kernel:
    """A decoder's kernel, as the engine calls it."""

    def __init__(self, kernel: DecoderKernel) -> None:
        self._kernel = kernel

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        return self._kernel.forward(batch.token_ids, batch.kv_rows(), batch.logits_rows, kv_cache)


class _Moment:
    """When the GPU came so far; without one, when the host did."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._at = time.perf_counter()
        if self._event is not None:
            self._event.record()

    def until(self, later: _Moment) -> float:
        """Milliseconds."""
        if self._event is None or later._event is None:
            return (later._at - self._at) * 1e3
        return float(self._event.elapsed_time(later._event))


class _Timed(DeviceRunner):
    """Notes begin and end, on the GPU, of the steps that only decode; the first of them come as they do in service."""

    def __init__(self, decoder: DeviceDecoder, kv_cache: KvCache, sampler: DeviceSampler, num_passing: int) -> None:
        """Before each decode step after `num_passing` the GPU waits."""
        super().__init__(decoder, kv_cache, sampler)
        self._device = kv_cache.tensor.device
        self._num_passing = num_passing
        self.decoding: list[tuple[_Moment, _Moment]] = []

    def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
        only_decodes = bool(plan.decoding) and not plan.chunks
        if only_decodes and len(self.decoding) >= self._num_passing and self._device.type == "cuda":
            torch.cuda._sleep(_HEAD_START_CYCLES)
        begin = _Moment(self._device)
        results = super().launch(plan, batch, report_layers)
        if only_decodes:
            self.decoding.append((begin, _Moment(self._device)))
        return results
