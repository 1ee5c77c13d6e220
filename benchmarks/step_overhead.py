"""Overhead of a decode step around the model: the step thread with a decoder whose forward pass is free.

    python -m benchmarks.step_overhead [--against DIRECTORY] [--repeats 5] [--steps 300] [--out benchmarks/results]

Each case runs a number of sequences to the same length through the decode tier's scheduler, batch building, sampling
and publishing, with the vocabulary of the default model. A step's time is the time between two publications. With
`--against`, another checkout of the repository is measured alternately with this one, each in its own processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from benchmarks import environment
from benchmarks.result_files import write_results
from benchmarks.sampling import cpu_sampler
from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from kernels.choice import instruction_sets
from kernels.decoder import LayerListener
from pdserve.base.ids import RequestId
from pdserve.base.layout import KvLayout
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.cpu_sampler import CpuSampler
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.loop import LoopConfig, StepLoop
from pdserve.engine.runner import Runner
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.engine.step import StepOutput
from pdserve.model.batch import Batch

VOCABULARY = 49_152
BLOCK_SIZE = 16
PROMPT_TOKENS = 256
WARM_UP_STEPS = 50
WAIT_S = 60.0

SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "top_p": SamplingParams(temperature=0.2, top_p=0.9),
    "plain": SamplingParams(temperature=1.0),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5),
}
CASES = tuple((sampling, size) for sampling in SAMPLING for size in (1, 8, 64) if sampling == "greedy" or size < 64)


class NullDecoder:
    """A decoder that returns logits from a buffer filled once."""

    def __init__(self, max_num_seqs: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self._logits = torch.randn(max_num_seqs, VOCABULARY, generator=generator) * 3

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        """Float32 [num_logits, VOCABULARY]."""
        return self._logits[: len(batch.logits_rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Medians over the steps of one run, in microseconds."""

    sampling: str
    batch_size: int
    #: Time between two publications minus the forward pass.
    overhead_us: float
    schedule_us: float
    build_us: float
    sample_us: float


def run_case(sampling: str, size: int, num_steps: int) -> Case:
    """Runs one batch of `size` sequences that decode together."""
    length = PROMPT_TOKENS + WARM_UP_STEPS + num_steps + 8
    pool = BlockPool(size * (length // BLOCK_SIZE + 2), BLOCK_SIZE)
    layout = KvLayout.uniform(
        model="null", dtype="bfloat16", block_size=BLOCK_SIZE, num_layers=1, num_kv_heads=1, head_dim=1
    )
    scheduler = DecodeScheduler(
        pool, DecodeSchedulerConfig(limits=SequenceLimits(max_model_len=8192, vocab_size=VOCABULARY), max_num_seqs=size)
    )
    runner = Runner(NullDecoder(size), KvCache(layout, pool.num_blocks, torch.device("cpu")), _sampler())
    published: list[tuple[float, StepOutput]] = []
    ended: SimpleQueue[object] = SimpleQueue()

    def publish(output: StepOutput) -> None:
        published.append((time.perf_counter(), output))
        if output.events.finished:
            ended.put(output)

    loop = StepLoop(
        scheduler,
        runner,
        publish=publish,
        on_fatal=ended.put,
        config=LoopConfig(num_threads=1),
    )
    jobs = [_job(index, SAMPLING[sampling], length) for index in range(size)]

    def reserve_all() -> None:
        for job in jobs:
            scheduler.reserve(job)

    loop.start()
    loop.call(reserve_all).result(WAIT_S)
    if isinstance(error := ended.get(timeout=WAIT_S * size), BaseException):
        raise error
    loop.stop()
    steps = [(at, output) for at, output in published if output.num_sequences == output.num_tokens == size]
    return _summary(sampling, size, steps[WARM_UP_STEPS : WARM_UP_STEPS + num_steps])


def _sampler() -> Sampler | CpuSampler:
    """The sampler of a worker on a CPU, with one thread."""
    available = instruction_sets()
    return cpu_sampler(available[0], 1) if available else Sampler()


def _job(index: int, params: SamplingParams, length: int) -> DecodeJob:
    return DecodeJob(
        request_id=RequestId(f"r{index:03}"),
        prompt_token_ids=[(index * 31 + position) % VOCABULARY for position in range(PROMPT_TOKENS)],
        params=SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            logprobs=params.logprobs,
            seed=index,
            max_tokens=length - PROMPT_TOKENS,
            ignore_eos=True,
        ),
        hash_key=bytes(32),
        local_prefill_threshold=2**32 - 1,
    )


def _summary(sampling: str, size: int, steps: list[tuple[float, StepOutput]]) -> Case:
    times = [at for at, _ in steps]
    durations = [output.durations for _, output in steps]
    overheads = [
        later - earlier - step.forward_s for earlier, later, step in zip(times, times[1:], durations[1:], strict=False)
    ]

    def median_us(values: list[float]) -> float:
        return round(statistics.median(values) * 1e6, 1)

    return Case(
        sampling=sampling,
        batch_size=size,
        overhead_us=median_us(overheads),
        schedule_us=median_us([step.schedule_s for step in durations]),
        build_us=median_us([step.build_s for step in durations]),
        sample_us=median_us([step.sample_s for step in durations]),
    )


def measure(directory: Path, num_steps: int) -> list[Case]:
    """Runs all cases once with the code and the benchmark of `directory`, in a separate process.

    The benchmark is that checkout's own, because names that it uses may have changed since.
    """
    script = directory.resolve() / "benchmarks" / Path(__file__).name
    out = subprocess.run(
        [sys.executable, script, "--once", "--steps", str(num_steps)],
        env=os.environ | {"PYTHONPATH": str(directory)},
        cwd=directory,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Case(**row) for row in json.loads(out.stdout)]


def medians(runs: list[list[Case]]) -> list[Case]:
    """Medians of each case over the runs."""
    fields = ("overhead_us", "schedule_us", "build_us", "sample_us")
    return [
        replace(cases[0], **{name: round(statistics.median(getattr(c, name) for c in cases), 1) for name in fields})
        for cases in zip(*runs, strict=True)
    ]


def table(here: list[Case], against: list[Case]) -> str:
    """Markdown: one row per case, microseconds."""
    lines = [
        "| sampling | batch | schedule | build | sample | around the model | before | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case, old in zip_longest(here, against):
        before, ratio = (f"{old.overhead_us:.0f}", f"{old.overhead_us / case.overhead_us:.1f}x") if old else ("", "")
        lines.append(
            f"| {case.sampling} | {case.batch_size} | {case.schedule_us:.0f} | {case.build_us:.0f} "
            f"| {case.sample_us:.0f} | {case.overhead_us:.0f} | {before} | {ratio} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout, measured alternately with this one")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, help="directory of the raw results and the table")
    parser.add_argument("--once", action="store_true", help="print the cases of one run as JSON")
    args = parser.parse_args()
    if args.once:
        print(json.dumps([asdict(run_case(sampling, size, args.steps)) for sampling, size in CASES]))
        return
    root = Path(__file__).parents[1]
    here: list[list[Case]] = []
    against: list[list[Case]] = []
    for number in range(args.repeats):
        here.append(measure(root, args.steps))
        if args.against:
            against.append(measure(args.against, args.steps))
        print(f"run {number + 1} of {args.repeats} done", file=sys.stderr)
    shown = table(medians(here), medians(against))
    print(shown)
    if args.out:
        about = environment.describe()
        name = f"step-overhead-{about['date']}"
        raw = {
            "environment": about,
            "steps": args.steps,
            "here": [[asdict(case) for case in run] for run in here],
            "against": [[asdict(case) for case in run] for run in against],
        }
        write_results(args.out, name, raw, environment.heading(about, "Microseconds") + shown + "\n")


if __name__ == "__main__":
    main()
