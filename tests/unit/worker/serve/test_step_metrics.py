"""Step reports reach the callbacks."""

from __future__ import annotations

from dataclasses import replace

from pdserve.engine.pace import Pace
from pdserve.engine.step import Load, StepDurations, StepEvents, StepOutput
from pdserve.worker.serve.metrics import WorkerMetrics
from pdserve.worker.serve.step_metrics import _EMPTY, StepMetrics


def output(load: Load) -> StepOutput:
    return StepOutput(
        events=StepEvents(),
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
