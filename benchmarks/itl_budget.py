"""Effect of the ITL budget: token gaps of running sequences while the same worker prefills long prompts.

    python -m benchmarks.itl_budget MODEL_DIRECTORY [--budgets-ms 15,25,50,1000] [--repeats 3] [--out DIRECTORY]

Runs one decode worker's step loop with a real model: sequences decode while prompts arrive one after another. Times are
the engine's, without network and router. The budgets alternate.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue

from benchmarks.environment import describe, heading
from benchmarks.result_files import write_results
from decode_svc.config import DecodeConfig
from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.loop import LoopConfig, StepLoop
from pdserve.engine.step import StepOutput
from pdserve.worker.serve.loaded_model import LoadedModel, load_model
from pdserve.worker.serve.warm_up import warm_up

NUM_RUNNING = 4
RUNNING_PROMPT_TOKENS = 64
LONG_PROMPT_TOKENS = 1536
NUM_LONG_PROMPTS = 3
VOCABULARY = 40_000
WAIT_S = 120.0
UNENDING = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Result of one run with one budget."""

    budget_ms: float
    #: Median step without concurrent prefill.
    decode_step_ms: float
    #: Token gaps during prefill.
    itl_p50_ms: float
    itl_p99_ms: float
    itl_max_ms: float
    #: Median time from a prompt's arrival to its first token.
    ttft_ms: float


class Engine:
    """A step loop, and its outputs with the time of each."""

    def __init__(self, model: LoadedModel, budget_ms: float, threads: int) -> None:
        self.scheduler = DecodeScheduler(
            BlockPool(model.pool.num_blocks, model.layout.block_size),
            DecodeSchedulerConfig(limits=model.limits, max_num_batched_tokens=512, itl_budget_s=budget_ms / 1000),
        )
        self._outputs: SimpleQueue[tuple[float, StepOutput] | BaseException] = SimpleQueue()
        self._loop = StepLoop(
            self.scheduler,
            model.runner,
            publish=lambda output: self._outputs.put((time.perf_counter(), output)),
            on_fatal=self._outputs.put,
            config=LoopConfig(num_threads=threads),
        )
        self._loop.start()
        self._loop.call(lambda: warm_up(model, max_prompt_tokens=512)).result(WAIT_S)

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> float:
        """Queues a request; returns the time."""
        job = DecodeJob(
            request_id=RequestId(request_id),
            prompt_token_ids=prompt,
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            hash_key=bytes(32),
            local_prefill_threshold=2**32 - 1,
        )
        at = time.perf_counter()
        self._loop.call(lambda: self.scheduler.reserve(job)).result(WAIT_S)
        return at

    def next(self) -> tuple[float, StepOutput]:
        """The next step's output with its time. Raises the error that ended the loop."""
        item = self._outputs.get(timeout=WAIT_S)
        if isinstance(item, BaseException):
            raise item
        return item

    def stop(self) -> None:
        """Ends the loop."""
        self._loop.stop()


def run(model: LoadedModel, budget_ms: float, threads: int, rng: random.Random) -> Case:
    """Lets sequences decode without prefill for a while, then adds prompts."""
    engine = Engine(model, budget_ms, threads)

    def prompt(size: int) -> list[int]:
        return [rng.randrange(100, VOCABULARY) for _ in range(size)]

    for index in range(NUM_RUNNING):
        engine.add(f"running-{index}", prompt(RUNNING_PROMPT_TOKENS), UNENDING)
    alone: list[float] = []
    while len(alone) < 60:
        at, output = engine.next()
        if output.num_sequences == output.num_tokens == NUM_RUNNING and not output.num_prefill_tokens:
            alone.append(at)
    mixed = [alone[-1]]
    ttfts: list[float] = []
    for index in range(NUM_LONG_PROMPTS):
        arrived = engine.add(f"long-{index}", prompt(LONG_PROMPT_TOKENS), 1)
        while len(ttfts) == index:
            at, output = engine.next()
            advanced = {tokens.request_id for tokens in output.events.tokens}
            if "running-0" in advanced:
                mixed.append(at)
            if f"long-{index}" in advanced:
                ttfts.append(at - arrived)
    engine.stop()
    gaps = sorted(later - earlier for earlier, later in pairwise(mixed))

    def ms(seconds: float) -> float:
        return round(seconds * 1000, 1)

    return Case(
        budget_ms=budget_ms,
        decode_step_ms=ms(statistics.median(later - earlier for earlier, later in pairwise(alone[10:]))),
        itl_p50_ms=ms(statistics.median(gaps)),
        itl_p99_ms=ms(gaps[len(gaps) * 99 // 100]),
        itl_max_ms=ms(gaps[-1]),
        ttft_ms=ms(statistics.median(ttfts)),
    )


def table(cases: list[Case], budgets: list[float]) -> str:
    """Markdown: one row per budget, medians over the runs, milliseconds."""
    names = ("decode_step_ms", "itl_p50_ms", "itl_p99_ms", "itl_max_ms", "ttft_ms")
    lines = [
        "| ITL budget | decode step alone | ITL p50 | p99 | longest | TTFT of the prompts |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for budget in budgets:
        mine = [case for case in cases if case.budget_ms == budget]
        cells = (f"{statistics.median(getattr(case, name) for case in mine):.1f}" for name in names)
        lines.append(f"| {budget:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="directory of the model, in Hugging Face layout")
    parser.add_argument("--budgets-ms", default="15,25,50,1000")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="directory of the raw results and the table")
    args = parser.parse_args()
    config = DecodeConfig(
        model=str(args.model), redis_url="", threads=args.threads, kv_cache_memory=512 * 2**20, max_num_seqs=64
    )
    model, rng = load_model(config), random.Random(args.seed)
    budgets = [float(text) for text in args.budgets_ms.split(",")]
    cases = [run(model, budget, args.threads, rng) for _ in range(args.repeats) for budget in budgets]
    shown = table(cases, budgets)
    print(shown)
    if args.out:
        environment = describe()
        name = f"itl-budget-{environment['date']}"
        raw = {
            "environment": environment,
            "model": args.model.name,
            "threads": args.threads,
            "seed": args.seed,
            "num_running": NUM_RUNNING,
            "long_prompt_tokens": LONG_PROMPT_TOKENS,
            "cases": [asdict(case) for case in cases],
        }
        write_results(args.out, name, raw, heading(environment, "Milliseconds") + shown + "\n")


if __name__ == "__main__":
    main()
