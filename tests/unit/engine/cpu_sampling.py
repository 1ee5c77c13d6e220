"""The C++ sampler without a decoder, for tests."""

from __future__ import annotations

from typing import Protocol, cast

from kernels.cpu import native
from kernels.cpu.sampling import NativeSampler, RowSampler
from pdserve.engine.cpu_sampler import CpuSampler


class _Native(Protocol):
    def Machine(self, isa: str, num_threads: int, cpus: list[int]) -> NativeSampler: ...  # noqa: N802 - a class


def cpu_sampler(isa: str, num_threads: int = 1) -> CpuSampler:
    """A sampler with threads of its own."""
    return CpuSampler(RowSampler(cast(_Native, native.load()).Machine(isa, num_threads, [])))
