"""The table of issue and promise: which figure each row gives, and what it must reach.

Pure: what was measured in, figures out.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from enum import Enum

from kernels.bench.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The best the device showed in this run."""

    #: Bytes read plus bytes written.
    copy_gb_per_s: float
    #: Of a product of two bfloat16 matrices.
    matmul_tflop_per_s: float

    def best(self, other: Ceilings) -> Ceilings:
        """Of two looks at the device."""
        return Ceilings(
            copy_gb_per_s=max(self.copy_gb_per_s, other.copy_gb_per_s),
            matmul_tflop_per_s=max(self.matmul_tflop_per_s, other.matmul_tflop_per_s),
        )

    def copy_ms(self, work: Work) -> float:
        """How long its bytes take."""
        return work.num_bytes / self.copy_gb_per_s / 1e6

    def matmul_ms(self, work: Work) -> float:
        """How long its multiplications and additions take."""
        return work.flops / self.matmul_tflop_per_s / 1e9

    def least_ms(self, work: Work) -> float:
        """The time below which it cannot be done: the longer of both."""
        return max(self.copy_ms(work), self.matmul_ms(work))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Repeated times of a call, the work that is in it, and in a few words how it was called."""

    samples_ms: tuple[float, ...]
    work: Work
    how: str
    #: Of what it is compared with: another mode, or a peer.
    against_ms: tuple[float, ...] = ()

    @property
    def median_ms(self) -> float:
        """Of the samples."""
        return statistics.median(self.samples_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured:
    """A row without a figure; `is_failure` when there should have been one."""

    why: str
    is_failure: bool = False


Finding = Measured | NotMeasured


class Figure(Enum):
    """What a row shows."""

    OF_COPY = "share of the copy bandwidth"
    OF_MATMUL = "share of the matmul peak"
    TFLOPS = "TFLOP/s"
    GB_PER_S = "GB/s"
    #: Other's time over ours.
    TIMES_FASTER = "times faster"
    #: Our time over the other's.
    TIMES_SLOWER = "times slower"
    #: What the other's time leaves of ours.
    IDLE = "share of the time"
    #: As it is.
    MS = "ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    key: str
    what: str
    figure: Figure
    #: What must be reached, or for `TIMES_SLOWER` not exceeded; None: it is only watched.
    bound: float | None
    #: Instead of the bound's number.
    bound_text: str | None = None

    def value(self, measured: Measured, ceilings: Ceilings) -> float:
        """The figure."""
        work, ms = measured.work, measured.median_ms
        match self.figure:
            case Figure.OF_COPY:
                return ceilings.copy_ms(work) / ms
            case Figure.OF_MATMUL:
                return ceilings.matmul_ms(work) / ms
            case Figure.TFLOPS:
                return work.flops / ms / 1e9
            case Figure.GB_PER_S:
                return work.num_bytes / ms / 1e6
            case Figure.TIMES_FASTER:
                return statistics.median(measured.against_ms) / ms
            case Figure.TIMES_SLOWER:
                return ms / statistics.median(measured.against_ms)
            case Figure.IDLE:
                return 1 - statistics.median(measured.against_ms) / ms
            case Figure.MS:
                return ms

    def is_reached(self, value: float) -> bool | None:
        """None when it is only watched."""
        if self.bound is None:
            return None
        return value <= self.bound if self.figure is Figure.TIMES_SLOWER else value >= self.bound

    def show(self, value: float) -> str:
        """For people."""
        match self.figure:
            case Figure.OF_COPY | Figure.OF_MATMUL | Figure.IDLE:
                return f"{100 * value:.0f} %"
            case Figure.TIMES_FASTER | Figure.TIMES_SLOWER:
                return f"{value:.2f}x"
            case _:
                return f"{value:.3g} {self.figure.value}"

    @property
    def shown_bound(self) -> str:
        """For people."""
        if self.bound is None:
            return self.bound_text or "–"
        return f"{'at most' if self.figure is Figure.TIMES_SLOWER else 'at least'} {self.show(self.bound)}"


ROWS: tuple[Row, ...] = (
    Row(
        key="decode-attention-4k",
        what="paged decode attention, batch 64, context 4k: share of the copy bandwidth",
        figure=Figure.OF_COPY,
        bound=0.8,
    ),
    Row(
        key="decode-attention-32k",
        what="paged decode attention, batch 64, context 32k: share of the copy bandwidth",
        figure=Figure.OF_COPY,
        bound=0.8,
    ),
    Row(
        key="prefill-attention",
        what="prefill attention, 8k causal",
        figure=Figure.TFLOPS,
        bound=450.0,
    ),
    Row(
        key="decode-1",
        what="whole decode step, batch 1, context 2k: (weights + KV) / copy bandwidth",
        figure=Figure.OF_COPY,
        bound=0.8,
    ),
    Row(
        key="decode-64",
        what="whole decode step, batch 64, context 2k: (weights + KV) / copy bandwidth",
        figure=Figure.OF_COPY,
        bound=0.75,
    ),
    Row(
        key="prefill",
        what="prefill of 8k tokens, whole model: share of the matmul peak",
        figure=Figure.OF_MATMUL,
        bound=0.6,
    ),
    Row(
        key="transformers",
        what="64 requests, 1k in, 256 out: throughput against transformers' continuous batching, same weights",
        figure=Figure.TIMES_FASTER,
        bound=3.0,
    ),
    Row(
        key="deterministic",
        what="deterministic mode, decode step, batch 64, context 2k: against fast mode",
        figure=Figure.TIMES_SLOWER,
        bound=1.4,
    ),
    Row(
        key="handover",
        what="KV handover of 8k tokens (1 GiB) between two processes on the GPU",
        figure=Figure.GB_PER_S,
        bound=300.0,
    ),
    Row(
        key="handover-exposed",
        what="the same: time after the last kernel that nothing hides",
        figure=Figure.MS,
        bound=None,
        bound_text="one layer group",
    ),
    # Not in the issue: parts of others, and what is only watched.
    Row(
        key="handover-nccl",
        what="KV handover of 8k tokens (1 GiB) over NCCL, between two GPUs",
        figure=Figure.GB_PER_S,
        bound=None,
    ),
    Row(
        key="pack",
        what="packing KV blocks of 8k tokens (1 GiB) with digests: share of the copy bandwidth",
        figure=Figure.OF_COPY,
        bound=None,
    ),
    Row(
        key="unpack",
        what="unpacking them, with digests: share of the copy bandwidth",
        figure=Figure.OF_COPY,
        bound=None,
    ),
    Row(
        key="idle-1",
        what="decode steps of the engine, batch 1, context 2k, deterministic: share of the time in which the GPU idles",
        figure=Figure.IDLE,
        bound=None,
    ),
    Row(
        key="idle-64",
        what="the same, batch 64",
        figure=Figure.IDLE,
        bound=None,
    ),
)
