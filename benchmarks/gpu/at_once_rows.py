"""Rows of many requests at once through the engine: output, and what its steps took by their kind."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from functools import partial

from benchmarks.gpu.engine import make_engine, make_job
from benchmarks.gpu.rows import Measured
from benchmarks.gpu.setting import DTYPE, Setting
from kernels.bench.inputs import BLOCK_SIZE
from kernels.bench.work import Work, decoder_work
from pdserve.engine.device_runner import DeviceRunner
from pdserve.engine.graph_shapes import plan_graphs
from pdserve.engine.step import StepOutput
from pdserve.engine.stepper import Stepper
from pdserve.worker.config import GPU_STEP

#: Requests in one run, as a multiple of those at once.
_ROUNDS = 2
#: As `--itl-budget-ms` by default.
_ITL_BUDGET_S = 0.05


class _Steps:
    """Time from one step's results to the next one's, by kind of step."""

    def __init__(self) -> None:
        self._at = time.perf_counter()
        self.seconds: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        #: Time of each step with decoding sequences, once for each of these.
        self.gaps_ms: list[float] = []

    def observe(self, output: StepOutput) -> None:
        """Takes in the results of a step."""
        now = time.perf_counter()
        passed_s, self._at = now - self._at, now
        num_decoding = output.num_tokens - output.num_prefill_tokens
        kind = "decode" if not output.num_prefill_tokens else "mixed" if num_decoding else "prompts"
        self.seconds[kind] += passed_s
        self.counts[kind] += 1
        self.gaps_ms += [passed_s * 1e3] * num_decoding

    def __str__(self) -> str:
        kinds = (f"{kind} {self.seconds[kind]:.2f} s in {self.counts[kind]}" for kind in ("prompts", "mixed", "decode"))
        p99 = statistics.quantiles(self.gaps_ms, n=100, method="inclusive")[-1] if len(self.gaps_ms) > 1 else 0.0
        return f"steps: {', '.join(kinds)}; gap p99 {p99:.0f} ms"


def at_once(setting: Setting, streams: int) -> Measured:
    """Answers twice as many requests as streams, as many at once as these. A first run is not counted."""
    from pdserve.engine.device_sampler import DeviceSampler

    prompt_tokens, output_tokens = setting.sizes.request_tokens
    length = prompt_tokens + output_tokens
    engine = make_engine(
        setting,
        batch=streams,
        length=length,
        max_prompt_tokens=min(GPU_STEP.prompt_tokens, setting.sizes.prefill_tokens),
        itl_budget_s=_ITL_BUDGET_S,
        graphs=plan_graphs(streams, -(-length // BLOCK_SIZE), any_width=False),
    )
    runner = DeviceRunner(engine.decoder, engine.kv_cache, DeviceSampler(setting.device))
    scheduler, num_requests, num_started = engine.scheduler, _ROUNDS * streams, 0

    def run(steps: _Steps) -> None:
        nonlocal num_started
        stepper, end = Stepper(scheduler, runner, steps.observe), num_started + num_requests
        while num_started < end or scheduler.has_work():
            while num_started < end and scheduler.load().num_running + scheduler.load().num_waiting < streams:
                scheduler.reserve(make_job(setting, num_started, prompt_tokens, output_tokens))
                num_started += 1
            stepper.step(lambda: True)
        stepper.publish()

    run(_Steps())
    measured = _Steps()
    ms = setting.clock.once_ms(partial(run, measured))
    return Measured(
        samples_ms=(ms,),
        work=_work(setting, num_requests),
        how=str(measured),
        num_tokens=num_requests * output_tokens,
    )


def _work(setting: Setting, num_requests: int) -> Work:
    """Work of all prompts, each in one chunk, and all decode steps with as many sequences as there are streams."""
    (prompt_tokens, output_tokens), shape = setting.sizes.request_tokens, setting.shape
    weight_bytes, streams = setting.decoder(deterministic=True).weight_bytes, num_requests // _ROUNDS
    total = Work(num_bytes=0.0, flops=0.0)
    for _ in range(num_requests):
        total += decoder_work(shape, [(prompt_tokens, prompt_tokens)], DTYPE.itemsize, 0)
    for step in range(1, output_tokens):
        spans = [(1, prompt_tokens + step)] * streams
        for _ in range(_ROUNDS):
            total += decoder_work(shape, spans, DTYPE.itemsize, weight_bytes)
    return total
