"""The engine of a simulated worker: the product's stepper and step loop, and the simulation's forward pass.

The step loop is a task instead of a thread. A step's work happens when it starts, and its output is published when its
time is over, between two calls: nothing else may touch the engine's state meanwhile, so nobody sees a difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from queue import Empty
from random import Random
from typing import Any, ClassVar

import numpy as np
import torch

from pdserve.engine.kv_cache import KvCache
from pdserve.engine.loop import StepLoop
from pdserve.engine.sequence import Sampled, SampleResult, SampleRow, unprepared
from pdserve.engine.sequence import Sequence as EngineSequence
from pdserve.engine.step import LayersWritten, StepPlan
from pdserve.model.grammar import GrammarFailed
from tests.simulation.model import BLOCK_SIZE, kv_of, logprobs_of, sample, state_of, upper_layer

#: Virtual seconds of a step, and of each prompt token in it.
_STEP_S, _TOKEN_S = 0.004, 0.0002


class StepClock:
    """The clock of a step, which computes at once and takes its time afterwards."""

    def __init__(self) -> None:
        self.chance = Random(0)
        #: Time that the running step has taken so far.
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s

    def compute(self, num_tokens: int) -> None:
        """A forward pass."""
        self.ahead_s += _STEP_S * (0.5 + self.chance.random()) + _TOKEN_S * num_tokens


#: In place of `perf_counter` in the stepper.
STEP_CLOCK = StepClock()


class SimulatedRunner:
    """Implements what `Stepper` uses of `pdserve.engine.runner.Runner`."""

    overlaps = False
    #: A step takes no time; the wait for it comes afterwards.
    interrupt = None

    def __init__(self, kv_cache: KvCache) -> None:
        self.kv_cache = kv_cache
        memory = kv_cache.memory
        assert memory is not None
        #: uint64 [blocks, layers, slots of a block].
        self._kv = memory.view(np.uint64).reshape(kv_cache.num_blocks, 2, BLOCK_SIZE)

    def build(self, plan: StepPlan) -> Any:
        """Nothing to prepare."""
        return None

    def try_out(self, batch: object) -> None:
        """Nothing to warm up."""

    def prepare(self, *, is_idle: bool) -> bool:
        """Nothing is recorded."""
        return False

    def settle(self) -> bool:
        """No step is launched ahead."""
        return False

    def launch(
        self, plan: StepPlan, batch: object, report_layers: Callable[[LayersWritten], None] | None = None
    ) -> Callable[[], list[SampleResult]]:
        """Copies, writes the KV of every pending token, and samples from what the blocks hold then."""
        self.kv_cache.copy_blocks(plan.copies)
        states: list[int] = []
        STEP_CLOCK.compute(plan.num_prefill_tokens + len(plan.decoding))
        for sequence in plan.decoding:
            self._write(sequence, len(sequence.tokens) - 1, len(sequence.tokens))
        for chunk in plan.chunks:
            self._write(chunk.sequence, chunk.start, chunk.stop)
        for report in plan.reports:
            if report_layers is not None:
                report_layers(report)
        states += [self._state(sequence, len(sequence.tokens)) for sequence in plan.decoding]
        states += [self._state(chunk.sequence, chunk.stop) for chunk in plan.chunks if chunk.samples]
        rows, state_rows = plan.sample_rows()
        results = [_sampled(row, states[index]) for row, index in zip(rows, state_rows, strict=True)]
        return lambda: results

    def _write(self, sequence: EngineSequence, start: int, stop: int) -> None:
        table, kv = sequence.block_table, self._kv
        before = 0
        if start:
            last = start - 1
            before = int(kv[table[last // BLOCK_SIZE], 0, last % BLOCK_SIZE])
        for position in range(start, stop):
            before = kv_of(before, sequence.tokens[position], position)
            block, slot = table[position // BLOCK_SIZE], position % BLOCK_SIZE
            kv[block, 0, slot] = before
            kv[block, 1, slot] = upper_layer(before)

    def _state(self, sequence: EngineSequence, num_tokens: int) -> int:
        num_blocks = -(-num_tokens // BLOCK_SIZE)
        found = self._kv[np.frombuffer(sequence.block_table, np.int64, num_blocks)]
        return state_of(found.transpose(1, 0, 2).reshape(2, -1), num_tokens)


def _sampled(row: SampleRow, state: int) -> SampleResult:
    params = row.params
    try:
        allowed = row.allowed()
    except GrammarFailed as error:
        return unprepared(error)
    token = sample(state, params, row.choice_index, row.position, tuple(row.stop_ids), allowed)
    count = params.logprobs
    return Sampled(token_id=token, logprobs=None if count is None else logprobs_of(state, token, count))


class SimulatedStepLoop(StepLoop):
    """A step loop that is a task of the event loop."""

    #: Seconds by which the next step takes longer, by scheduler: a step thread that hangs.
    delays: ClassVar[dict[int, float]] = {}

    def __init__(self, scheduler: Any, runner: Any, **named: Any) -> None:
        super().__init__(scheduler, runner, **named)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._steps(), name="steps")

    def call(self, fn: Callable[[], Any]) -> Any:
        future = super().call(fn)
        self._wake.set()
        return future

    def stop(self) -> None:
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
        self._close()

    async def _steps(self) -> None:
        try:
            while not self._stopping:
                self._run_what_is_queued()
                if self._scheduler.has_work():
                    self._awake_since = self._awake_since or asyncio.get_running_loop().time()
                    with torch.inference_mode():
                        self._stepper.step(self._calls.empty)
                    step_s, STEP_CLOCK.ahead_s = STEP_CLOCK.ahead_s, 0.0
                    await asyncio.sleep(step_s + self.delays.pop(id(self._scheduler), 0.0))
                elif self._calls.empty():
                    self._awake_since = None
                    self._wake.clear()
                    await self._wake.wait()
        except Exception as error:  # noqa: BLE001 - as the thread does
            self._on_fatal(error)
        finally:
            self._close()

    def _run_what_is_queued(self) -> None:
        # As `_run_calls`: what a call publishes must not overtake the output of the step before it.
        if not self._scheduler.has_work() or not self._calls.empty():
            self._stepper.publish()
        try:
            while True:
                self._calls.get_nowait().run()
        except Empty:
            return
