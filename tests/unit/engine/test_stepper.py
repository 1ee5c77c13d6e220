"""The order in which steps are launched, collected and published, the state that calls find, and reported times."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import pytest
from torch import Tensor

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from kernels.decoder import LayerListener
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.runner import ReportLayers, Results, Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import Fault, SampleResult
from pdserve.engine.step import StepOutput, StepPlan
from pdserve.engine.stepper import Stepper
from pdserve.model.batch import Batch
from tests.unit.engine.fakes import BLOCK_SIZE, CPU, KEY, FakeDecoder, expected, layout, limits
from tests.unit.engine.late import LateRunner
from tests.unit.engine.test_loop import WAIT_S, rig

PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
A, B = RequestId("a"), RequestId("b")


def job(request_id: RequestId, prompt: list[int], params: SamplingParams = PARAMS) -> DecodeJob:
    return DecodeJob(
        request_id=request_id, prompt_token_ids=prompt, params=params, hash_key=KEY, local_prefill_threshold=99
    )


class Clock:
    """A clock that only tests advance."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class RecordingRunner(LateRunner):
    """Records launches and collections. A launch takes 1 s, a collection 10 s."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(FakeDecoder(), KvCache(layout(), 16, CPU), Sampler())
        self.lines: list[str] = []
        self._clock = clock
        self._num_launched = 0

    def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
        self._num_launched += 1
        self._clock.now += 1
        self.lines.append(f"launch {self._num_launched}")
        return partial(self._note_end, self._num_launched, super().launch(plan, batch, report_layers))

    def _note_end(self, number: int, results: Results) -> list[SampleResult]:
        self._clock.now += 10
        self.lines.append(f"collect {number}")
        return results()


def scheduler_of(*jobs: DecodeJob) -> DecodeScheduler:
    scheduler = DecodeScheduler(BlockPool(16, BLOCK_SIZE), DecodeSchedulerConfig(limits=limits()))
    for each in jobs:
        scheduler.reserve(each)
    return scheduler


def stepper(scheduler: DecodeScheduler, clock: Clock) -> tuple[Stepper, RecordingRunner, list[StepOutput]]:
    runner, outputs = RecordingRunner(clock), list[StepOutput]()

    def publish(output: StepOutput) -> None:
        outputs.append(output)
        runner.lines.append(f"publish {len(outputs)}")

    return Stepper(scheduler, runner, publish), runner, outputs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("pdserve.engine.stepper.perf_counter", made)
    return made


def test_a_step_is_launched_before_the_previous_one_is_collected_and_published_later(clock: Clock) -> None:
    steps, runner, _ = stepper(scheduler_of(job(A, [1, 2, 3])), clock)
    steps.step(lambda: True)  # the prompt
    steps.step(lambda: True)
    steps.publish()
    assert runner.lines == [
        *("launch 1", "collect 1"),
        *("launch 2", "launch 3", "publish 1", "collect 2"),
        *("launch 4", "publish 2", "collect 3"),
        *("launch 5", "publish 3", "collect 4"),
        *("publish 4", "collect 5", "publish 5"),
    ]


def test_nothing_is_launched_ahead_while_a_call_waits(clock: Clock) -> None:
    steps, runner, _ = stepper(scheduler_of(job(A, [1, 2, 3])), clock)
    for _ in range(2):
        steps.step(lambda: False)
    assert runner.lines == ["launch 1", "collect 1", "launch 2", "publish 1", "collect 2"]
    answers = [False, True]
    steps.step(answers.pop)
    assert runner.lines[5:] == ["launch 3", "launch 4", "publish 2", "collect 3", "publish 3", "collect 4"]


def test_tokens_do_not_wait_for_the_launch_of_a_chunk(clock: Clock) -> None:
    scheduler = scheduler_of(job(A, [1, 2, 3]))
    steps, runner, _ = stepper(scheduler, clock)
    for _ in range(2):
        steps.step(lambda: False)
    scheduler.reserve(job(B, [4, 5, 6]))
    steps.step(lambda: True)
    assert runner.lines == [
        *("launch 1", "collect 1"),
        *("launch 2", "publish 1", "collect 2"),
        *("publish 2", "launch 3", "collect 3"),
    ]


def test_a_step_launched_ahead_is_timed_from_result_to_result(clock: Clock) -> None:
    steps, _, outputs = stepper(scheduler_of(job(A, [1, 2, 3])), clock)
    steps.step(lambda: True)
    clock.now += 1000  # Idle time, which belongs to no step.
    steps.step(lambda: True)
    steps.publish()
    # The prompt; a step that also pays for the launch of the next; two whose launch was hidden; the last.
    paces = [output.pace.decode_step_s for output in outputs]
    assert paces[1:] == pytest.approx([12.0, 12.0 - 0.2 * 1, 11.8 - 0.2 * 0.8, 11.64 - 0.2 * 1.64])
    assert outputs[0].pace.prefill_token_s == pytest.approx(11 / 3)
    assert [output.is_ahead for output in outputs] == [False, False, True, True, True]
    assert {(output.durations.forward_s, output.durations.sample_s) for output in outputs} == {(1.0, 10.0)}


class Eager(Runner):
    """A runner that computes when it launches, as on a CPU."""

    def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
        assert not plan.is_ahead
        return super().launch(plan, batch, report_layers)


def test_a_runner_that_does_not_overlap_never_plans_ahead() -> None:
    scheduler = scheduler_of(job(A, [1, 2, 3]))
    outputs: list[StepOutput] = []
    steps = Stepper(scheduler, Eager(FakeDecoder(), KvCache(layout(), 16, CPU), Sampler()), outputs.append)
    while scheduler.has_work():
        steps.step(lambda: True)
    steps.publish()
    assert len(outputs) == PARAMS.max_tokens


class Gated(LateRunner):
    """Blocks the step thread when it collects a step while another one is in flight."""

    def __init__(self) -> None:
        super().__init__(FakeDecoder(), KvCache(layout(), 16, CPU), Sampler())
        self.entered, self.gate = threading.Event(), threading.Event()

    def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
        return partial(self._hold, super().launch(plan, batch, report_layers))

    def _hold(self, results: Results) -> list[SampleResult]:
        if len(self.in_flight) == 2:
            self.entered.set()
            assert self.gate.wait(WAIT_S)
        return results()


def test_a_call_finds_nothing_in_flight_and_all_outputs_published() -> None:
    runner = Gated()
    with rig(runner=runner) as it:
        it.submit([1, 2, 3])
        assert runner.entered.wait(WAIT_S)
        call = it.loop.call(lambda: (len(runner.in_flight), it.outputs.qsize()))
        runner.gate.set()
        # The prompt, and the two steps that were in flight.
        assert call.result(WAIT_S) == (0, 3)
        assert it.tokens() == expected([1, 2, 3], PARAMS, 0, limits())


def test_aborting_with_two_steps_in_flight_frees_everything() -> None:
    runner = Gated()
    with rig(runner=runner) as it:
        it.submit([1, 2, 3])
        assert runner.entered.wait(WAIT_S)
        call = it.loop.call(lambda: (it.scheduler.abort(RequestId("r")), it.scheduler.load().free_blocks))
        runner.gate.set()
        assert call.result(WAIT_S) == (True, 16)
        assert it.loop.call(it.scheduler.has_work).result(WAIT_S) is False


def test_a_request_that_arrives_with_two_steps_in_flight_gets_its_own_tokens() -> None:
    runner, other = Gated(), [4, 5, 6, 7, 8]
    with rig(runner=runner) as it:
        it.submit([1, 2, 3])
        assert runner.entered.wait(WAIT_S)
        params = replace(PARAMS, max_tokens=9)
        it.loop.call(lambda: it.scheduler.reserve(job(B, other, params)))
        runner.gate.set()
        outputs: dict[RequestId, list[int]] = {}
        finished: set[RequestId] = set()
        while len(finished) < 2:
            events = it.outputs.get(timeout=WAIT_S).events
            for tokens in events.tokens:
                outputs.setdefault(tokens.request_id, []).extend(tokens.choices[0].token_ids)
            finished.update(events.finished)
    assert outputs["r"] == expected([1, 2, 3], PARAMS, 0, limits())
    assert outputs[B] == expected(other, params, 0, limits())


def test_stopping_waits_for_steps_in_flight() -> None:
    runner = Gated()
    with rig(runner=runner) as it:
        it.submit([1, 2, 3])
        assert runner.entered.wait(WAIT_S)
        stopper = threading.Thread(target=it.loop.stop)
        stopper.start()
        runner.gate.set()
        stopper.join(WAIT_S)
        assert not stopper.is_alive()
        assert runner.in_flight == []
        assert it.fatal.empty()


class BreaksLater(FakeDecoder):
    def __init__(self) -> None:
        self._count = 0

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        self._count += 1
        if self._count == 3:
            raise RuntimeError("the accelerator fell off the bus")
        return super().forward(batch, kv_cache)


def test_an_error_in_a_step_launched_ahead_ends_the_loop_and_is_reported() -> None:
    runner = LateRunner(BreaksLater(), KvCache(layout(), 16, CPU), Sampler())
    with rig(runner=runner) as it:
        it.submit([1, 2, 3])
        assert "fell off the bus" in str(it.fatal.get(timeout=WAIT_S))
        # Outputs of earlier steps are published if there was time for it.
        assert [bool(it.outputs.get(timeout=WAIT_S).events.tokens) for _ in range(2)] == [True, True]


class Unbuildable(RecordingRunner):
    """Cannot build a batch with a sequence of one request beyond a number of tokens."""

    def __init__(self, clock: Clock, broken: RequestId, max_tokens: int) -> None:
        super().__init__(clock)
        self._broken = broken
        self._max_tokens = max_tokens

    def build(self, plan: StepPlan) -> Batch | None:
        for sequence in plan.scheduled():
            if sequence.request_id == self._broken and sequence.num_tokens + plan.is_ahead > self._max_tokens:
                raise ValueError("a broken row")
        return super().build(plan)


@pytest.mark.parametrize("max_tokens", [2, 3, 4, 6])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_request_for_which_no_batch_can_be_built_fails_alone(max_tokens: int, overlaps: bool, clock: Clock) -> None:
    scheduler = scheduler_of(job(A, [1, 2, 3]), job(B, [4, 5, 6], replace(PARAMS, n=2, temperature=1.0)))
    runner = Unbuildable(clock, B, max_tokens)
    runner.overlaps = overlaps
    outputs = list[StepOutput]()
    steps = Stepper(scheduler, runner, outputs.append)
    while scheduler.has_work():
        steps.step(lambda: True)
        scheduler.check_integrity()
    steps.publish()
    [failure] = [each for output in outputs for each in output.events.failures]
    assert (failure.request_id, failure.fault) == (B, Fault.PREPARATION)
    tokens: dict[RequestId, list[int]] = {A: [], B: []}
    for new in (each for output in outputs for each in output.events.tokens):
        tokens[new.request_id] += (token for choice in new.choices for token in choice.token_ids)
    assert tokens[A] == expected([1, 2, 3], PARAMS, 0, limits())
    assert len(tokens[B]) == 2 * (max_tokens - 2)
    assert scheduler.load().free_blocks == scheduler.load().total_blocks


def test_an_error_that_no_request_causes_alone_ends_the_loop(clock: Clock) -> None:
    class Crowded(RecordingRunner):
        def build(self, plan: StepPlan) -> Batch | None:
            assert len(plan.scheduled()) < 2, "crowded"
            return super().build(plan)

    steps = Stepper(scheduler_of(job(A, [1, 2, 3]), job(B, [4, 5, 6])), Crowded(clock), lambda output: None)
    with pytest.raises(AssertionError, match="crowded"):
        steps.step(lambda: True)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_lack_of_memory_is_no_failure_of_a_request(is_ahead: bool, clock: Clock) -> None:
    class Small(RecordingRunner):
        def build(self, plan: StepPlan) -> Batch | None:
            if plan.is_ahead or (not is_ahead and len(plan.scheduled()) == 1):
                raise MemoryError
            if not is_ahead:
                raise ValueError("a broken row")
            return super().build(plan)

    runner = Small(clock)
    runner.overlaps = is_ahead
    steps = Stepper(scheduler_of(job(A, [1, 2, 3]), job(B, [4, 5, 6])), runner, lambda output: None)
    with pytest.raises(MemoryError):
        for _ in range(5):
            steps.step(lambda: True)


def test_after_an_error_the_requests_of_the_failed_step_are_known(clock: Clock) -> None:
    class Breaking(RecordingRunner):
        def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
            raise RuntimeError("a defect of a kernel")

    scheduler = scheduler_of(job(A, [1, 2, 3]))
    steps = Stepper(scheduler, Breaking(clock), lambda output: None)
    scheduler.reserve(job(B, [4, 5, 6]))
    with pytest.raises(RuntimeError, match="a defect of a kernel"):
        steps.step(lambda: True)
    assert steps.requests == {A, B}
