"""The age of what the step thread does: long for a hang, short for a busy loop, zero for an idle one."""

from __future__ import annotations

import threading
from pathlib import Path
from types import FunctionType, SimpleNamespace

import pytest
from torch import Tensor

from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from kernels.decoder import LayerListener
from pdserve.engine import loop as loop_module
from pdserve.engine import stepper as stepper_module
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.loop import StepLoop
from pdserve.engine.pace import Pace
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.step import StepPlan
from pdserve.model.batch import Batch
from tests.unit.engine.fakes import BLOCK_SIZE, CPU, FakeDecoder, layout, limits
from tests.unit.engine.test_loop import WAIT_S, Held, block, rig
from tests.unit.engine.test_loop_busy import BusyChanges


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock of the step thread: a nanosecond for each look, and what tests add."""
    clock = SimpleNamespace(now=1000.0)

    def read() -> float:
        clock.now += 1e-9
        return clock.now

    for module in (loop_module, stepper_module):
        monkeypatch.setattr(module, "perf_counter", read)
    return clock


def test_a_step_that_does_not_end_grows_old(clock: SimpleNamespace) -> None:
    decoder = Held()
    with rig(decoder) as it:
        it.submit([1, 2, 3])
        assert decoder.entered.wait(WAIT_S)
        clock.now += 200
        assert round(it.loop.stalled_s) == 200
        clock.now += 200
        assert round(it.loop.stalled_s) == 400
        assert it.loop.position.startswith("wait (threading.py:")
        assert "forward (test_loop.py:" in it.loop.position
        decoder.gate.set()


def test_a_thread_that_compiles_a_kernel_says_so() -> None:
    decoder = Held()
    # For the interpreter, a function of Triton's compiler.
    compiling = FunctionType(_compile.__code__.replace(co_name="compile"), {"__name__": "triton.compiler.compiler"})
    with rig(decoder) as it:
        entered, gate = threading.Event(), threading.Event()
        it.loop.call(lambda: compiling(entered, gate))
        assert entered.wait(WAIT_S)
        assert it.loop.is_compiling
        gate.set()
        it.submit([1, 2, 3])
        assert decoder.entered.wait(WAIT_S)
        assert not it.loop.is_compiling
        decoder.gate.set()


def test_compiling_keeps_a_step_young_for_an_hour(clock: SimpleNamespace) -> None:
    """Fails if the limit for a hang counts it: a worker that compiles for long would be restarted, again and again."""
    compiling = FunctionType(_compile.__code__.replace(co_name="compile"), {"__name__": "triton.compiler.compiler"})
    with rig() as it:
        entered, gate = threading.Event(), threading.Event()
        it.loop.call(lambda: compiling(entered, gate))
        assert entered.wait(WAIT_S)
        for _ in range(5):
            clock.now += 700
            assert it.loop.stalled_s < 1
        clock.now += 700
        assert round(it.loop.stalled_s) == 700
        gate.set()


def test_tritons_own_compiler_is_seen_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # What it is anyway, without a warning.
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import JITFunction

    entered, gate = threading.Event(), threading.Event()

    def held(*arguments: object) -> None:
        _compile(entered, gate)
        raise InterruptedError("seen")

    monkeypatch.setattr(CUDABackend, "add_stages", held)
    # Not `triton.jit`, which interprets kernels in these tests.
    source = triton.compiler.ASTSource(fn=JITFunction(_kernel), signature={"pointer": "*fp32"}, constexprs={})
    with rig() as it:
        called = it.loop.call(lambda: triton.compile(source, target=GPUTarget("cuda", 90, 32)))
        assert entered.wait(WAIT_S)
        assert it.loop.is_compiling
        gate.set()
        with pytest.raises(InterruptedError, match="seen"):
            called.result(WAIT_S)


def _kernel(pointer):  # type: ignore[no-untyped-def]
    pass


def _compile(entered: threading.Event, gate: threading.Event) -> None:
    entered.set()
    gate.wait()


class Slow(FakeDecoder):
    """Takes 100 s for each forward pass, and records the loop's age at its start."""

    loop: StepLoop

    def __init__(self, clock: SimpleNamespace) -> None:
        self.ages: list[int] = []
        self._clock = clock

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        self.ages.append(round(self.loop.stalled_s))
        self._clock.now += 100
        return super().forward(batch, kv_cache)


def test_each_step_that_computes_starts_anew(clock: SimpleNamespace) -> None:
    decoder = Slow(clock)
    with rig(decoder) as it:
        decoder.loop = it.loop
        it.submit([1, 2, 3])
        it.tokens()
    assert decoder.ages == [0] * 5


def test_an_idle_loop_does_not_age(clock: SimpleNamespace) -> None:
    changes = BusyChanges()
    with rig(config=loop_module.LoopConfig(on_busy=changes)) as it:
        assert changes.next() is False  # Asleep. A call that comes before that is taken without a sleep.
        it.submit([1, 2, 3])
        it.tokens()
        assert it.loop.stalled_s < 1
        assert [changes.next(), changes.next()] == [True, False]
        clock.now += 36_000
        assert it.loop.stalled_s == 0
    assert it.loop.stalled_s == 0
    assert it.loop.position == "ended"


def test_a_call_that_does_not_return_grows_old(clock: SimpleNamespace) -> None:
    with rig() as it:
        gate = block(it.loop)
        clock.now += 200
        assert round(it.loop.stalled_s) == 200
        gate.set()


class Spinning(DecodeScheduler):
    """Claims to have work and plans nothing, from its second step on at a clock moved by 100 s."""

    def __init__(self, clock: SimpleNamespace, ages: list[int]) -> None:
        super().__init__(BlockPool(4, BLOCK_SIZE), DecodeSchedulerConfig(limits=limits()))
        self._clock, self._ages = clock, ages
        self.loop: StepLoop | None = None

    def has_work(self) -> bool:
        return self.loop is not None and len(self._ages) < 3

    def schedule(self, pace: Pace) -> StepPlan:
        assert self.loop is not None
        self._ages.append(round(self.loop.stalled_s))
        self._clock.now += 100
        return super().schedule(pace)


def test_steps_that_compute_nothing_are_no_progress(clock: SimpleNamespace) -> None:
    ages: list[int] = []
    scheduler = Spinning(clock, ages)
    runner = Runner(FakeDecoder(), KvCache(layout(), 4, CPU), Sampler())
    loop = StepLoop(scheduler, runner, publish=lambda _: None, on_fatal=lambda _: None)
    loop.start()
    try:
        loop.call(lambda: setattr(scheduler, "loop", loop)).result(WAIT_S)
        loop.call(lambda: None).result(WAIT_S)
        while len(ages) < 3:
            loop.call(lambda: None).result(WAIT_S)
    finally:
        loop.stop()
    assert ages == [0, 100, 200]
