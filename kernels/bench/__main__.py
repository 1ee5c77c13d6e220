"""The command: measures, prints each line as soon as it is known, and writes JSON on request."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from kernels.bench.cases import GROUPS, Case, Setting
from kernels.bench.measure import Limits, measure_limits, median_us
from kernels.bench.shapes import SHAPES
from kernels.choice import instruction_sets
from kernels.cpu import native


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One op, measured."""

    shape: str
    op: str
    size: str
    format: str
    threads: int
    us: float
    gb_per_s: float
    gflop_per_s: float
    #: Share of the speed that memory or multipliers allow, whichever is lower.
    share_of_limit: float
    #: The reference's time divided by ours. For int8 the reference computes in bfloat16.
    times_reference: float | None


def measure(shape: str, case: Case, limits: Limits, rounds: int) -> Measurement:
    """Measures our op first, then the reference's."""
    us = median_us(case.call, rounds) / case.count
    reference_us = None if case.reference is None else median_us(case.reference, rounds) / case.reference_count
    return Measurement(
        shape=shape,
        op=case.op,
        size=case.size,
        format=case.weight_format,
        threads=limits.threads,
        us=us,
        gb_per_s=case.work.num_bytes / us / 1e3,
        gflop_per_s=case.work.flops / us / 1e3,
        share_of_limit=limits.least_us(case.work, case.weight_format) / us,
        times_reference=None if reference_us is None else reference_us / us,
    )


def show(text: str) -> None:
    """Prints a line and flushes it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def row(line: Measurement) -> str:
    """A row of the table."""
    ratio = "" if line.times_reference is None else f"{line.times_reference:.2f}x"
    return (
        f"{line.op:<14} {line.size:<22} {line.format:<5} {line.threads:>3} {line.us:>12.1f} {line.gb_per_s:>8.1f} "
        f"{line.gflop_per_s:>9.1f} {line.share_of_limit * 100:>6.0f} % {ratio:>10}"
    )


HEADER = (
    f"{'op':<14} {'size':<22} {'':<5} {'thr':>3} {'us':>12} {'GB/s':>8} {'GFLOP/s':>9} {'of limit':>8} "
    f"{'reference':>10}"
)


def _names(text: str, known: Sequence[str]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(known)}")
    return names


def _parser() -> argparse.ArgumentParser:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(prog="pdserve bench kernels", description=__doc__)
    for flag, known in (("--shapes", list(SHAPES)), ("--ops", list(GROUPS))):
        text = f"of {','.join(known)}; default: all"
        parser.add_argument(flag, type=partial(_names, known=known), default=known, help=text)
    parser.add_argument(
        "--threads",
        type=lambda text: [int(count) for count in text.split(",")],
        default=sorted({1, cores}),
        help="comma-separated numbers of threads; default: 1 and all cores",
    )
    parser.add_argument("--instruction-set", choices=instruction_sets(), help="default: the best one of this machine")
    parser.add_argument("--rounds", type=int, default=7, help="number of calls; the result is their median")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if not instruction_sets():
        parser.exit(1, f"error: there are no C++ kernels to measure: {native.missing_reason()}\n")
    isa = arguments.instruction_set or instruction_sets()[0]
    torch.manual_seed(0)
    lines: list[Measurement] = []
    limits: list[Limits] = []
    with torch.inference_mode():
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            limit = measure_limits(isa, threads, arguments.rounds)
            for name in arguments.shapes:
                show(f"\n{name}\n{HEADER}")
                for group in arguments.ops:
                    # Measured again for each group: on a shared machine a single measurement may be too low.
                    limit = limit.best(measure_limits(isa, threads, arguments.rounds))
                    for case in GROUPS[group](Setting(shape=SHAPES[name], instruction_set=isa, threads=threads)):
                        lines.append(measure(name, case, limit, arguments.rounds))
                        show(row(lines[-1]))
            limits.append(limit)
            show(
                f"\n{isa}, {threads} threads: memory read {limit.read_gb_per_s:.1f} GB/s; torch's best product "
                f"{limit.bf16_gflop_per_s:.0f} GFLOP/s in bf16, {limit.f32_gflop_per_s:.0f} in f32"
            )
    if arguments.json is not None:
        result = {"instruction_set": isa, "torch": torch.__version__, "limits": limits, "results": lines}
        arguments.json.write_text(json.dumps(result, indent=1, default=asdict) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
