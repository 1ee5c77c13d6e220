"""Time of sampling a step's rows on a CPU: the C++ threads against the sampler in numpy, alternately in one process.

    python -m benchmarks.sampling [--rows 64] [--vocabulary 151936] [--threads 2] [--repeats 9] [--out DIRECTORY]

Logits are normal numbers times 3, other ones for each row. Both samplers must return the same results. The best
instruction set is measured, or that of `--instruction-set`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import Tensor

from benchmarks import environment
from benchmarks.result_files import write_results
from kernels.choice import instruction_sets
from kernels.cpu import native
from kernels.cpu.sampling import NativeSampler, RowSampler
from pdserve.base.sampling import SamplingParams
from pdserve.engine.cpu_sampler import CpuSampler
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import SampleResult, SampleRow

SCALE = 3.0
SEED = 1
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 64

CASES = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_p 0.9, temperature 0.2": SamplingParams(top_p=0.9, temperature=0.2),
    "top_p 0.9, temperature 2": SamplingParams(top_p=0.9, temperature=2.0),
    "top_k 50": SamplingParams(top_k=50),
    "min_p 0.05": SamplingParams(min_p=0.05),
    "top_p 0.9, penalties": SamplingParams(top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.5),
    "top_p 0.9, 5 log-probabilities": SamplingParams(top_p=0.9, logprobs=5),
}


class _NativeMachine(Protocol):
    def Machine(self, isa: str, num_threads: int, cpus: list[int]) -> NativeSampler: ...  # noqa: N802 - a class


def cpu_sampler(instruction_set: str, num_threads: int) -> CpuSampler:
    """A sampler with threads of its own."""
    return CpuSampler(RowSampler(cast(_NativeMachine, native.load()).Machine(instruction_set, num_threads, [])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """All samples of one case, in milliseconds for all rows."""

    name: str
    numpy_ms: list[float]
    cpp_ms: list[float]
    #: Processor time of all threads.
    cpp_cpu_ms: list[float]

    @property
    def ratio(self) -> float:
        """How many times faster C++ is, by the medians."""
        return statistics.median(self.numpy_ms) / statistics.median(self.cpp_ms)


def rows_of(params: SamplingParams, count: int, vocabulary: int) -> list[SampleRow]:
    """Rows with other seeds and tokens, each in the midst of its output."""
    length = PROMPT_TOKENS + OUTPUT_TOKENS
    return [
        SampleRow(
            params=replace(params, seed=index),
            choice_index=0,
            tokens=array("q", ((index * 31 + position * 7) % vocabulary for position in range(length))),
            num_prompt=PROMPT_TOKENS,
        )
        for index in range(count)
    ]


def measure(name: str, logits: Tensor, samplers: tuple[Sampler, CpuSampler], repeats: int) -> Case:
    """Alternates the samplers."""
    count, vocabulary = logits.shape
    rows = rows_of(CASES[name], count, vocabulary)
    times: tuple[list[float], list[float]] = ([], [])
    cpu_times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats + 1):
        results: list[list[SampleResult]] = []
        for sampler, elapsed, computed in zip(samplers, times, cpu_times, strict=True):
            started_at, cpu_before = time.perf_counter(), time.process_time()
            results.append(sampler.sample(logits, rows, range(count)))
            elapsed.append(round((time.perf_counter() - started_at) * 1000, 3))
            computed.append(round((time.process_time() - cpu_before) * 1000, 3))
        assert results[0] == results[1], f"the samplers disagree: {name}"
    # The first of each is a warm-up.
    return Case(name=name, numpy_ms=times[0][1:], cpp_ms=times[1][1:], cpp_cpu_ms=cpu_times[1][1:])


def table(cases: list[Case]) -> str:
    """Markdown: one row per case, milliseconds."""
    lines = [
        "| sampling | numpy | C++ | fastest C++ | least processor time of all threads | ratio |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for case in cases:
        numpy_ms, cpp_ms = statistics.median(case.numpy_ms), statistics.median(case.cpp_ms)
        least = f"{min(case.cpp_ms):.1f} | {min(case.cpp_cpu_ms):.1f}"
        lines.append(f"| {case.name} | {numpy_ms:.1f} | {cpp_ms:.1f} | {least} | {case.ratio:.1f}x |")
    return "\n".join(lines)


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--instruction-set", choices=instruction_sets(), default=instruction_sets()[0])
    parser.add_argument("--out", type=Path, help="directory of the raw results and the table")
    args = parser.parse_args()
    samplers = Sampler(), cpu_sampler(args.instruction_set, args.threads)
    logits = torch.randn(args.rows, args.vocabulary, generator=torch.Generator().manual_seed(SEED)) * SCALE
    cases = [measure(name, logits, samplers, args.repeats) for name in CASES]
    shown = table(cases)
    print(shown)
    if args.out:
        about = environment.describe()
        raw = {
            "environment": about,
            "settings": {**vars(args), "out": None, "scale": SCALE, "seed": SEED},
            "cases": [asdict(case) for case in cases],
        }
        title = (
            f"{args.rows} rows, a vocabulary of {args.vocabulary:,}, {args.threads} threads, {args.instruction_set}. "
            "Medians in milliseconds"
        )
        write_results(args.out, f"sampling-{about['date']}", raw, environment.heading(about, title) + shown + "\n")


if __name__ == "__main__":
    main()
