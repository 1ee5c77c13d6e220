"""Steps overlap on a device only, and steps launched ahead are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.devices import DEVICE

pytest.importorskip("triton")

from kernels.choice import Backend, KernelOptions
from pdserve.engine.device_sampler import DeviceSampler
from pdserve.engine.graphs import DeviceDecoder
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.pace import Pace
from pdserve.engine.sampler import Sampler
from pdserve.engine.step import StepDurations, StepEvents, StepOutput
from pdserve.worker.load.model_shard import ModelShard
from pdserve.worker.serve.loaded_model import _runner
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.step_metrics import _EMPTY, StepMetrics
from tests.property.model.tiny_models import make_decoder
from tests.unit.engine.fakes import CPU, layout
from tests.unit.engine.test_step_on_device import FIELDS


def output(*, is_ahead: bool) -> StepOutput:
    return StepOutput(
        events=StepEvents(tier="decode"),
        load=_EMPTY,
        durations=StepDurations(schedule_s=0.0, build_s=0.0, forward_s=0.0, sample_s=0.0),
        pace=Pace(),
        is_ahead=is_ahead,
        num_sequences=1,
        num_tokens=1,
        num_prefill_tokens=0,
    )


def test_steps_launched_ahead_are_counted() -> None:
    metrics = WorkerMetrics(model_name="m", tier="decode")
    steps = StepMetrics(metrics)
    for is_ahead in (False, True, True):
        steps.observe(output(is_ahead=is_ahead))
    labels = {"model_name": "m", "tier": "decode"}
    assert metrics.registry.get_sample_value("pdserve_steps_ahead_total", labels) == 2
    assert metrics.registry.get_sample_value("pdserve_iteration_tokens_count", labels) == 3


def test_steps_overlap_on_a_device_and_not_on_a_cpu() -> None:
    decoder = make_decoder(FIELDS, KernelOptions(backend=Backend.REFERENCE), torch.float32)
    on_device = DeviceDecoder(decoder, DEVICE)
    shard = ModelShard(
        layout=layout(),
        config=decoder.config,
        decoder=decoder,
        step_decoder=decoder,
        kv_cache=KvCache(layout(), 1, CPU),
    )
    assert not _runner(shard, Sampler()).overlaps
    assert _runner(replace(shard, step_decoder=on_device), DeviceSampler(DEVICE)).overlaps
