"""Steps: schedule -> build batch -> launch -> collect -> update, each told while the next one is computed.

On a CPU, launching a step is computing it. On a device it is not, so there the next step is launched at once, and the
device need not wait for the host:

    host    launch 1 | launch 2 | collect 1 | launch 3 | tell 1 | collect 2 | launch 4 | tell 2 | ...
    device           | ---------- 1 --------- | ---------- 2 ---------- | ---------- 3 -----------

Step 3 was planned before the tokens of step 2 were known: it computes the same sequences, and takes their tokens on the
device. A sequence that ends in step 2 is still in step 3, which writes to a block that is free by then. That block is
not handed out before step 3 has been collected, for everything that hands out blocks happens with nothing in flight:
calls, and `Scheduler.schedule`. The one exception, `Scheduler.plan_ahead`, does so only if no sequence has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from pdserve.engine.pace import PaceMeter
from pdserve.engine.runner import Results, Runner
from pdserve.engine.step import LayersWritten, Scheduler, StepDurations, StepOutput, StepPlan


@dataclass(slots=True)  # Not frozen: one is made in every step, and that would take longer.
class _StepInFlight:
    """A step that was launched, and when what began."""

    plan: StepPlan
    results: Results
    scheduling_at: float
    building_at: float
    launching_at: float
    launched_at: float


class Stepper:
    """Takes steps, on one thread. Between two calls nothing is in flight."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        publish: Callable[[StepOutput], None],
        on_layers: Callable[[LayersWritten], None] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._publish = publish
        self._on_layers = on_layers
        self._meter = PaceMeter()
        self._unpublished: StepOutput | None = None
        self._ended_at = 0.0

    def step(self, may_go_on: Callable[[], bool]) -> None:
        """Take one step, and those that can be launched ahead of the end of the one before, while `may_go_on`."""
        began = perf_counter()
        step = self._launch(self._scheduler.schedule(self._meter.pace), began)
        while (following := self._launch_ahead(step.plan, may_go_on)) is not None:
            self._complete(step)
            step = following
        self._complete(step)

    def publish(self) -> None:
        """Publish the last step: as late as the next one is computed, and nobody else needs the interpreter's lock.

        Whoever is told then finds it free, instead of holding up what this thread does between two steps.
        """
        if self._unpublished is not None:
            output, self._unpublished = self._unpublished, None
            self._publish(output)

    def _launch_ahead(self, plan: StepPlan, may_go_on: Callable[[], bool]) -> _StepInFlight | None:
        """Launch what follows `plan`, which is in flight alone, if that can be told and is not to wait."""
        if not self._runner.overlaps or not may_go_on():
            return None
        began = perf_counter()
        following = self._scheduler.plan_ahead(plan)
        return None if following is None else self._launch(following, began)

    def _launch(self, plan: StepPlan, began: float) -> _StepInFlight:
        scheduled = perf_counter()
        batch = self._runner.build(plan)
        built = perf_counter()
        # With chunks nothing is in flight and launching takes long: tokens should not wait for it. And what is told in
        # its middle, of chunks only, must not overtake the end of the step before.
        if plan.chunks or not self._runner.overlaps:
            self.publish()
        results = self._runner.launch(plan, batch, self._on_layers)
        return _StepInFlight(plan, results, began, scheduled, built, perf_counter())

    def _complete(self, step: _StepInFlight) -> None:
        """Wait for the oldest step in flight, and take in what it computed."""
        self.publish()
        collecting_at = perf_counter()
        sampled = step.results()
        collected_at = perf_counter()
        plan = step.plan
        events = self._scheduler.update(plan, sampled)
        ended_at = perf_counter()
        num_decoding, num_prefill_tokens = len(plan.decoding), plan.num_prefill_tokens
        # Of a step launched ahead from result to result: the device began it when the one before had ended.
        step_s = ended_at - max(step.scheduling_at, self._ended_at)
        self._ended_at = ended_at
        self._meter.observe(num_decoding=num_decoding, num_prefill_tokens=num_prefill_tokens, step_s=step_s)
        self._unpublished = StepOutput(
            events=events,
            load=self._scheduler.load(),
            durations=StepDurations(
                schedule_s=step.building_at - step.scheduling_at,
                build_s=step.launching_at - step.building_at,
                forward_s=step.launched_at - step.launching_at,
                sample_s=collected_at - collecting_at,
            ),
            pace=self._meter.pace,
            is_ahead=plan.is_ahead,
            num_sequences=num_decoding + len(plan.chunks),
            num_tokens=num_decoding + num_prefill_tokens,
            num_prefill_tokens=num_prefill_tokens,
        )
