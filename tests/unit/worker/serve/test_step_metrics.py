"""Step reports reach the callbacks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.engine.pace import Pace
from pdserve.engine.step import Load, StepDurations, StepEvents, StepOutput
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.step_metrics import _EMPTY, StepMetrics


def output(load: Load) -> StepOutput:
    return StepOutput(
        events=StepEvents(tier="decode"),
        load=load,
        durations=StepDurations(schedule_s=0.0, build_s=0.0, forward_s=0.0, sample_s=0.0),
        pace=Pace(),
        is_ahead=False,
        num_sequences=1,
        num_tokens=1,
        num_prefill_tokens=0,
    )


def test_an_emptied_queue_is_reported_once_whether_a_step_or_an_abort_emptied_it() -> None:
    steps = StepMetrics(WorkerMetrics(model_name="m", tier="prefill"))
    reported: list[Load] = []
    steps.on_queue_empty = lambda: reported.append(steps.load)
    queued = replace(_EMPTY, queued_prompt_tokens=700)
    idle = replace(_EMPTY, free_blocks=9)
    steps.set_load(queued)
    steps.observe(output(replace(queued, queued_prompt_tokens=200)))
    assert reported == []
    steps.observe(output(idle))
    # Steps that only decode.
    steps.observe(output(_EMPTY))
    steps.set_load(_EMPTY)
    assert reported == [idle]
    steps.set_load(queued)
    steps.set_load(idle)
    assert reported == [idle, idle]


def exported(steps: StepMetrics, metrics: WorkerMetrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"pdserve_{name}", {"model_name": "m", "tier": "decode"})


def test_a_rate_is_absent_until_it_is_measured_and_stays_when_the_worker_is_idle() -> None:
    metrics = WorkerMetrics(model_name="m", tier="decode")
    steps = StepMetrics(metrics)
    assert exported(steps, metrics, "prefill_tokens_per_second") is None
    # An empty queue takes no time, whatever the rate.
    assert exported(steps, metrics, "prefill_backlog_seconds") == 0.0
    queued = replace(_EMPTY, queued_prompt_tokens=700)
    steps.set_load(queued)
    assert exported(steps, metrics, "prefill_backlog_seconds") is None
    pace = Pace(decode_step_s=0.02, prefill_token_s=0.002)
    steps.observe(replace(output(queued), num_prefill_tokens=64, pace=pace))
    assert exported(steps, metrics, "prefill_tokens_per_second") == 500.0
    assert exported(steps, metrics, "prefill_backlog_seconds") == 1.4
    # Beside decoding, 30 of 50 ms are left for prefill.
    steps.itl_budget_s = 0.05
    assert exported(steps, metrics, "prefill_backlog_seconds") == pytest.approx(1.4 / 0.6)
    steps.observe(output(_EMPTY))
    assert exported(steps, metrics, "prefill_tokens_per_second") is not None
    assert exported(steps, metrics, "prefill_backlog_seconds") == 0.0


def test_held_reserved_and_free_blocks_add_up() -> None:
    metrics = WorkerMetrics(model_name="m", tier="decode")
    steps = StepMetrics(metrics)
    steps.set_load(replace(_EMPTY, total_blocks=100, free_blocks=30, reserved_blocks=20, waiting_blocks=45))
    names = ("kv_blocks_held", "kv_blocks_reserved", "kv_blocks_free", "kv_blocks_waiting")
    assert [exported(steps, metrics, name) for name in names] == [50.0, 20.0, 30.0, 45.0]
