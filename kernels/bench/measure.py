"""Measures the time of calls and the limits of the machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kernels.bench.work import Work
from kernels.cpu.ops import CpuOps

#: Much more than any cache.
_READ_BYTES = 256 << 20
#: Rows, features and depth of products for which libraries are fast.
_PRODUCTS = ((512, 2048, 2048), (1024, 1536, 576))


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The best measurements of this machine on a number of threads."""

    threads: int
    read_gb_per_s: float
    #: torch's best matrix product, bfloat16 and float32.
    bf16_gflop_per_s: float
    f32_gflop_per_s: float

    def best(self, other: Limits) -> Limits:
        """The better of two measurements on a noisy machine."""
        return Limits(
            threads=self.threads,
            read_gb_per_s=max(self.read_gb_per_s, other.read_gb_per_s),
            bf16_gflop_per_s=max(self.bf16_gflop_per_s, other.bf16_gflop_per_s),
            f32_gflop_per_s=max(self.f32_gflop_per_s, other.f32_gflop_per_s),
        )

    def least_us(self, work: Work, weight_format: str) -> float:
        """Minimum time of `work`, with memory or multipliers always busy. int8 counts as bf16."""
        gflop_per_s = self.f32_gflop_per_s if weight_format == "f32" else self.bf16_gflop_per_s
        return max(work.num_bytes / self.read_gb_per_s, work.flops / gflop_per_s) / 1e3


def median_us(call: Callable[[], object], rounds: int) -> float:
    """Microseconds of a call: the median of `rounds` calls, after one that warms up caches and memory."""
    call()
    return statistics.median(_once_us(call) for _ in range(rounds))


def measure_limits(instruction_set: str, threads: int, rounds: int) -> Limits:
    """The caller has set torch's number of threads."""
    # NumPy requests huge pages, as the decoder does for its weights.
    ops, memory = CpuOps(instruction_set, threads), torch.from_numpy(np.ones(_READ_BYTES, np.uint8))
    ops.read(memory)
    read_us = min(_once_us(lambda: ops.read(memory)) for _ in range(rounds))
    return Limits(
        threads=threads,
        read_gb_per_s=_READ_BYTES / read_us / 1e3,
        bf16_gflop_per_s=_best_product(torch.bfloat16, rounds),
        f32_gflop_per_s=_best_product(torch.float32, rounds),
    )


def _best_product(dtype: torch.dtype, rounds: int) -> float:
    best = 0.0
    for rows, features, depth in _PRODUCTS:
        x, weight = torch.randn(rows, depth).to(dtype), torch.randn(features, depth).to(dtype)
        torch.nn.functional.linear(x, weight)
        us = min(_once_us(partial(torch.nn.functional.linear, x, weight)) for _ in range(2 * rounds))
        best = max(best, 2 * rows * features * depth / us / 1e3)
    return best


def _once_us(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6
