"""The step thread: published outputs, calls between steps, stopping and failing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from time import perf_counter

import pytest
import torch
from torch import Tensor

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from kernels.decoder import LayerListener
from pdserve.base.errors import Draining, SetupError
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.loop import LoopConfig, StepLoop
from pdserve.engine.runner import Runner, StepDecoder
from pdserve.engine.sampler import Sampler
from pdserve.engine.step import StepOutput
from pdserve.model.batch import Batch
from tests.unit.engine.fakes import BLOCK_SIZE, CPU, KEY, FakeDecoder, expected, layout, limits

WAIT_S = 20
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@dataclass
class Rig:
    loop: StepLoop
    scheduler: DecodeScheduler
    outputs: SimpleQueue[StepOutput] = field(default_factory=SimpleQueue)
    fatal: SimpleQueue[BaseException] = field(default_factory=SimpleQueue)

    def submit(self, prompt: list[int]) -> None:
        job = DecodeJob(
            request_id=RequestId("r"), prompt_token_ids=prompt, params=PARAMS, hash_key=KEY, local_prefill_threshold=99
        )
        self.loop.call(lambda: self.scheduler.reserve(job)).result(WAIT_S)

    def tokens(self) -> list[int]:
        """All tokens until the request is finished."""
        received: list[int] = []
        while True:
            events = self.outputs.get(timeout=WAIT_S).events
            for tokens in events.tokens:
                received += [token for choice in tokens.choices for token in choice.token_ids]
            if events.finished:
                return received


@contextmanager
def rig(
    decoder: StepDecoder | None = None,
    config: LoopConfig | None = None,
    runner: Runner | None = None,
    *,
    has_started: bool = True,
) -> Iterator[Rig]:
    pool = BlockPool(16, BLOCK_SIZE)
    scheduler = DecodeScheduler(pool, DecodeSchedulerConfig(limits=limits()))
    runner = runner or Runner(decoder or FakeDecoder(), KvCache(layout(), 16, CPU), Sampler())
    outputs: SimpleQueue[StepOutput] = SimpleQueue()
    fatal: SimpleQueue[BaseException] = SimpleQueue()
    loop = StepLoop(scheduler, runner, publish=outputs.put, on_fatal=fatal.put, config=config)
    if has_started:
        loop.start()
    try:
        yield Rig(loop, scheduler, outputs, fatal)
    finally:
        loop.stop()


def test_requests_are_computed_and_each_step_is_published_once() -> None:
    with rig() as it:
        it.submit([1, 2, 3])
        assert it.tokens() == expected([1, 2, 3], PARAMS, 0, limits())
        assert it.outputs.empty()


def test_an_output_has_sizes_load_and_durations() -> None:
    with rig() as it:
        it.submit([1, 2, 3])
        first, second = it.outputs.get(timeout=WAIT_S), it.outputs.get(timeout=WAIT_S)
    assert (first.num_sequences, first.num_tokens, first.num_prefill_tokens) == (1, 3, 3)
    assert (second.num_sequences, second.num_tokens, second.num_prefill_tokens) == (1, 1, 0)
    assert first.load.num_running == 1
    phases = first.durations
    assert min(phases.schedule_s, phases.build_s, phases.forward_s, phases.sample_s) > 0


def test_calls_run_on_the_step_thread_in_order_and_wake_it() -> None:
    with rig() as it:
        for _ in range(3):  # The loop is asleep each time.
            numbers: SimpleQueue[int] = SimpleQueue()
            futures = [it.loop.call(partial(numbers.put, index)) for index in range(5)]
            assert it.loop.call(threading.get_ident).result(WAIT_S) != threading.get_ident()
            assert all(future.done() for future in futures)
            assert [numbers.get_nowait() for _ in range(5)] == [0, 1, 2, 3, 4]


def test_an_exception_of_a_call_goes_to_its_caller_and_the_loop_continues() -> None:
    with rig() as it:
        with pytest.raises(ZeroDivisionError):
            it.loop.call(lambda: 1 // 0).result(WAIT_S)
        assert it.loop.call(lambda: 7).result(WAIT_S) == 7


def block(loop: StepLoop) -> threading.Event:
    """Blocks the step thread in a call until the returned event is set."""
    gate, entered = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        assert gate.wait(WAIT_S)

    loop.call(wait)
    assert entered.wait(WAIT_S)
    return gate


def test_a_cancelled_call_is_not_run() -> None:
    with rig() as it:
        gate, ran = block(it.loop), []
        later = it.loop.call(lambda: ran.append(1))
        assert later.cancel()
        gate.set()
        it.loop.call(lambda: None).result(WAIT_S)
        assert ran == []


def test_a_call_runs_between_the_steps_of_a_running_request() -> None:
    with rig() as it:
        it.submit([1, 2, 3])
        it.outputs.get(timeout=WAIT_S)
        assert it.loop.call(lambda: it.scheduler.abort(RequestId("r"))).result(WAIT_S) in (True, False)
        it.loop.call(it.scheduler.check_integrity).result(WAIT_S)


def test_calls_after_stop_fail_instead_of_hanging() -> None:
    with rig() as it:
        it.loop.stop()
        with pytest.raises(Draining):
            it.loop.call(lambda: 1).result(WAIT_S)
        it.loop.stop()


def test_calls_queued_when_the_loop_stops_fail_instead_of_hanging() -> None:
    with rig() as it:
        gate = block(it.loop)
        stopper = threading.Thread(target=it.loop.stop)
        stopper.start()
        late = [it.loop.call(lambda: 1) for _ in range(3)]
        gate.set()
        stopper.join(WAIT_S)
        # They are answered whether they were queued before or after the request to stop.
        for future in late:
            error = future.exception(WAIT_S)
            assert error is None or isinstance(error, Draining)


class Held(FakeDecoder):
    """Waits in its second forward pass until the gate opens."""

    def __init__(self) -> None:
        self.entered, self.gate, self.count = threading.Event(), threading.Event(), 0

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        self.count += 1
        if self.count == 2:
            self.entered.set()
            assert self.gate.wait(WAIT_S)
        return super().forward(batch, kv_cache)


def test_a_step_is_published_before_the_next_forward_pass() -> None:
    decoder = Held()
    with rig(decoder) as it:
        it.submit([1, 2, 3])
        assert decoder.entered.wait(WAIT_S)
        assert it.outputs.get(timeout=WAIT_S).events.tokens
        assert it.outputs.empty()
        decoder.gate.set()


def test_a_step_is_published_before_a_later_call_runs() -> None:
    decoder, num_published = Held(), []
    with rig(decoder) as it:
        it.submit([1, 2, 3])
        assert decoder.entered.wait(WAIT_S)
        call = it.loop.call(lambda: num_published.append(it.outputs.qsize()))
        decoder.gate.set()
        call.result(WAIT_S)
    assert num_published == [2]


class Graphs:
    """Two graphs for the start and three others, each of which waits for a permit."""

    def __init__(self) -> None:
        self.started: SimpleQueue[bool] = SimpleQueue()
        self.permits = threading.Semaphore(0)
        self.num_recorded = 0

    def record_next(self, is_idle: bool) -> bool:
        if self.num_recorded == (5 if is_idle else 2):
            return False
        self.started.put(is_idle)
        assert self.permits.acquire(timeout=WAIT_S)
        self.num_recorded += 1
        return True


def recording(graphs: Graphs) -> Runner:
    """A runner that records them."""
    return Runner(FakeDecoder(), KvCache(layout(), 16, CPU), Sampler(), record_next=graphs.record_next)


def prepared(graphs: Graphs) -> Runner:
    """A runner that has recorded those for the start."""
    runner = recording(graphs)
    graphs.permits.release(2)
    while runner.prepare(is_idle=False):
        pass
    return runner


def test_graphs_are_recorded_while_nothing_else_is_to_be_done() -> None:
    graphs = Graphs()
    runner = recording(graphs)
    with rig(runner=runner) as it:
        assert not it.loop.call(lambda: graphs.num_recorded).result(WAIT_S)  # Those of the start come first.
        graphs.permits.release(2)
        it.loop.call(lambda: [runner.prepare(is_idle=False) for _ in range(3)]).result(WAIT_S)
        assert [graphs.started.get(timeout=WAIT_S) for _ in range(3)] == [False, False, True]
        # A call waits for the graph that is being recorded, and for no other one.
        call = it.loop.call(lambda: graphs.num_recorded)
        graphs.permits.release()
        assert call.result(WAIT_S) == 3
        assert graphs.started.get(timeout=WAIT_S)
        graphs.permits.release(2)
        it.submit([1, 2, 3])
        assert it.tokens() == expected([1, 2, 3], PARAMS, 0, limits())
        assert graphs.started.get(timeout=WAIT_S)
        it.loop.call(lambda: None).result(WAIT_S)
        assert graphs.num_recorded == 5


def test_a_thread_that_hangs_while_it_records_is_seen_to_stall() -> None:
    graphs = Graphs()
    with rig(runner=prepared(graphs)) as it:
        assert [graphs.started.get(timeout=WAIT_S) for _ in range(3)] == [False, False, True]
        assert it.loop.is_awake
        stalled_s = it.loop.stalled_s
        assert stalled_s > 0
        before = perf_counter()
        graphs.permits.release()
        assert graphs.started.get(timeout=WAIT_S)
        # Each graph is a start anew.
        assert it.loop.stalled_s <= perf_counter() - before
        graphs.permits.release(3)


def test_no_graph_is_recorded_while_a_request_waits_for_its_blocks() -> None:
    graphs = Graphs()
    runner = prepared(graphs)
    graphs.permits.release(3)
    with rig(runner=runner, has_started=False) as it:
        job = DecodeJob(
            request_id=RequestId("r"), prompt_token_ids=[1, 2], params=PARAMS, hash_key=KEY, local_prefill_threshold=0
        )
        it.scheduler.reserve(job)  # Its blocks come from a prefill worker.
        it.loop.start()
        assert it.outputs.get(timeout=WAIT_S).load.num_held == 1
        for _ in range(2):
            assert not it.loop.call(it.scheduler.has_work).result(WAIT_S)
        assert graphs.num_recorded == 2
        it.loop.call(lambda: it.scheduler.abort(RequestId("r"))).result(WAIT_S)
        assert [graphs.started.get(timeout=WAIT_S) for _ in range(5)] == [False, False, True, True, True]


class Broken(FakeDecoder):
    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        raise RuntimeError("the accelerator fell off the bus")


def test_an_error_of_a_step_ends_the_loop_and_is_reported() -> None:
    with rig(Broken()) as it:
        it.submit([1, 2, 3])
        assert "fell off the bus" in str(it.fatal.get(timeout=WAIT_S))
        it.loop.stop()
        with pytest.raises(Draining):
            it.loop.call(lambda: 1).result(WAIT_S)


class Witness(FakeDecoder):
    """Records inference mode, number of threads and CPUs of its calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, int, set[int]]] = []

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        self.seen.append((torch.is_inference_mode_enabled(), torch.get_num_threads(), affinity))
        return super().forward(batch, kv_cache)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
def test_only_the_step_thread_is_pinned_and_in_inference_mode() -> None:
    before, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    witness = Witness()
    try:
        with rig(witness, LoopConfig(compute_cpus=(min(before),), num_threads=1)) as it:
            it.submit([1, 2, 3])
            it.tokens()
    finally:
        torch.set_num_threads(num_threads)
    assert witness.seen[0] == (True, 1, {min(before)})
    assert os.sched_getaffinity(0) == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")
@pytest.mark.parametrize("cpus", [(), (100_000,)])
def test_unavailable_cpus_are_a_setup_error(cpus: tuple[int, ...]) -> None:
    scheduler = DecodeScheduler(BlockPool(1, 1), DecodeSchedulerConfig(limits=limits()))
    runner = Runner(FakeDecoder(), KvCache(layout(), 1, CPU), Sampler())
    loop = StepLoop(
        scheduler, runner, publish=lambda _: None, on_fatal=lambda _: None, config=LoopConfig(compute_cpus=cpus)
    )
    with pytest.raises(SetupError, match="compute_cpus"):
        loop.start()
