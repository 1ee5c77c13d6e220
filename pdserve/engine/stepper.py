"""Steps: schedule -> build batch -> launch -> collect -> update, each published while the next one is computed.

On a CPU, launching a step computes it. On a device it only queues the step, so the next one is launched at once and
the device never waits for the host:

    host    launch 1 | launch 2 | collect 1 | launch 3 | publish 1 | collect 2 | launch 4 | publish 2 | ...
    device           | ---------- 1 --------- | ----------- 2 ------------ | ------------ 3 -------------

Step 3 is planned before the tokens of step 2 are known: it computes the same sequences and reads their tokens on the
device. Where what may follow them depends on them, as with a grammar, step 3 is sampled when step 2 is collected
(`DeviceRunner`). A sequence that ends in step 2 is still part of step 3, which writes to a block that is free by then.
That block cannot be handed out before step 3 has been collected, because blocks are only allocated with nothing in
flight: in calls, and in `Scheduler.schedule`. The one exception is `Scheduler.plan_ahead`, which allocates only if no
sequence has ended.

A step that runs on the CPU and computes only requests that have ended in the meantime (`EndedRequests`) ends between
two layers, as if it had computed nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from kernels.decoder import PassInterrupted
from pdserve.base.ids import RequestId
from pdserve.base.logs import get_logger
from pdserve.engine.ended_requests import EndedRequests
from pdserve.engine.pace import PaceMeter
from pdserve.engine.runner import Results, Runner
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import SampleFailure, unprepared
from pdserve.engine.step import LayersWritten, StepDurations, StepOutput, StepPlan
from pdserve.model.batch import Batch

log = get_logger(__name__)


@dataclass(slots=True)  # Not frozen: every step makes one, and freezing takes longer.
class _StepInFlight:
    """A launched step, and the times at which its phases started."""

    plan: StepPlan
    results: Results
    scheduling_at: float
    building_at: float
    launching_at: float
    #: `Runner.launch` returned.
    launched_at: float


class Stepper:
    """Runs steps on one thread. Nothing is in flight between two calls of `step`."""

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
        #: End of the last step that computed tokens, on `perf_counter`.
        self.computed_at = 0.0
        #: The requests of the step at work; after an error, of the one that has failed.
        self._plan = StepPlan()
        #: Requests whose results are no longer wanted.
        self.ended_requests = EndedRequests(runner.interrupt)

    @property
    def requests(self) -> frozenset[RequestId]:
        """The requests of the last step."""
        return frozenset(sequence.request_id for sequence in self._plan.scheduled())

    def step(self, may_go_on: Callable[[], bool]) -> None:
        """Run one step. While `may_go_on`, also run steps that can be launched before the previous one has ended."""
        scheduling_at = perf_counter()
        self._plan = StepPlan()
        plan = self._plan = self._scheduler.schedule(self._meter.pace)
        building_at = perf_counter()
        step = self._launch(*self._build(plan), scheduling_at, building_at)
        while (following := self._launch_ahead(step.plan, may_go_on)) is not None:
            self._complete(step)
            step = following
        self._complete(step)

    def publish(self) -> None:
        """Publish the last step's output, if that is still to be done.

        It is done as late as possible, while the next step is computed without the interpreter's lock. Receivers then
        find the lock free, and do not delay this thread between two steps.
        """
        if self._unpublished is not None:
            output, self._unpublished = self._unpublished, None
            self._publish(output)

    def _launch_ahead(self, plan: StepPlan, may_go_on: Callable[[], bool]) -> _StepInFlight | None:
        """Launch the step after `plan`, the only one in flight, if it can be planned already and nothing else waits."""
        # Also when nothing follows: the device may still wait for it.
        if not self._runner.settle() or not may_go_on():
            return None
        scheduling_at = perf_counter()
        following = self._scheduler.plan_ahead(plan)
        if following is None:
            return None
        building_at = perf_counter()
        try:
            batch = self._runner.build(following)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - if it is a request's, the next step in order will find out whose
            log.warning("batch_not_built_ahead", exc=error)
            return None
        return self._launch(following, batch, scheduling_at, building_at)

    def _build(self, plan: StepPlan) -> tuple[StepPlan, Batch | None]:
        """The plan and its batch, without the requests for which no batch can be built: these fail alone.

        Raises whatever no single request is to blame for.
        """
        try:
            return plan, self._runner.build(plan)
        except MemoryError:
            raise
        except Exception as error:
            failures = self._unbuildable(plan)
            if not failures:
                raise
            log.error("batch_not_built", requests=",".join(failures), exc=error)
        for request_id, failure in failures.items():
            self._scheduler.fail(request_id, failure)
        rest = plan.without(failures)
        return rest, self._runner.build(rest)

    def _unbuildable(self, plan: StepPlan) -> dict[RequestId, SampleFailure]:
        """The requests of which a piece cannot be built alone."""
        pieces = [StepPlan(decoding=(each,)) for each in plan.decoding]
        pieces += [StepPlan(chunks=(each,)) for each in plan.chunks]
        failures: dict[RequestId, SampleFailure] = {}
        for piece in pieces:
            try:
                self._runner.build(piece)
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this request's
                [sequence] = piece.scheduled()
                failures[sequence.request_id] = unprepared(error)
        return failures

    def _launch(self, plan: StepPlan, batch: Batch | None, scheduling_at: float, building_at: float) -> _StepInFlight:
        launching_at = perf_counter()
        # A plan with chunks is launched with nothing in flight, and the launch takes long: tokens must not wait for it.
        # Layer reports, which only chunks have, are sent during the launch and must not overtake the previous step.
        if plan.chunks or not self._runner.overlaps:
            self.publish()
        try:
            with self.ended_requests.computing(plan):
                results = self._runner.launch(plan, batch, self._on_layers)
        except PassInterrupted:
            # The call that ends its requests comes next.
            plan = plan.without({sequence.request_id for sequence in plan.scheduled()})
            results = partial(self._runner.sample, plan, None)
        return _StepInFlight(
            plan=plan,
            results=results,
            scheduling_at=scheduling_at,
            building_at=building_at,
            launching_at=launching_at,
            launched_at=perf_counter(),
        )

    def _complete(self, step: _StepInFlight) -> None:
        """Wait for the oldest step in flight and process its results."""
        self.publish()
        collecting_at = perf_counter()
        sampled = step.results()
        collected_at = perf_counter()
        plan = step.plan
        events = self._scheduler.update(plan, sampled)
        ended_at = perf_counter()
        num_tokens, num_prefill_tokens = plan.num_tokens, plan.num_prefill_tokens
        # A step launched ahead is timed from result to result: the device starts it when the previous one has ended.
        step_s = ended_at - max(step.scheduling_at, self._ended_at)
        self._ended_at = ended_at
        if num_tokens:
            self.computed_at = ended_at
        self._meter.observe(
            num_decoding=num_tokens - num_prefill_tokens,
            num_prefill_tokens=num_prefill_tokens,
            step_s=step_s,
            num_sampled=0 if self._runner.overlaps else len(sampled),
            sample_s=collected_at - collecting_at,
        )
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
            num_sequences=len(plan.decoding) + len(plan.chunks),
            num_tokens=num_tokens,
            num_prefill_tokens=num_prefill_tokens,
        )
