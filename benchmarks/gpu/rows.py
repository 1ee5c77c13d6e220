"""The rows of the table: their figures and the bounds they must reach.

Pure: measurements in, figures out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kernels.bench.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Best rates of the device in this run."""

    #: Bytes read plus bytes written.
    copy_gb_per_s: float
    #: Rate of a product of two bfloat16 matrices.
    matmul_tflop_per_s: float

    def best(self, other: Ceilings) -> Ceilings:
        """The higher of both measurements of each rate."""
        return Ceilings(
            copy_gb_per_s=max(self.copy_gb_per_s, other.copy_gb_per_s),
            matmul_tflop_per_s=max(self.matmul_tflop_per_s, other.matmul_tflop_per_s),
        )

    def copy_ms(self, work: Work) -> float:
        """Milliseconds to move the bytes at the ceiling."""
        return work.num_bytes / self.copy_gb_per_s / 1e6

    def matmul_ms(self, work: Work) -> float:
        """Milliseconds for the multiplications and additions at the ceiling."""
        return work.flops / self.matmul_tflop_per_s / 1e9

    def least_ms(self, work: Work) -> float:
        """Lower bound of the time in milliseconds: the longer of both."""
        return max(self.copy_ms(work), self.matmul_ms(work))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Repeated times of a call, its work, and a short description of how it was called."""

    samples_ms: tuple[float, ...]
    work: Work
    how: str
    #: Times of the call it is compared with: another mode, or a peer.
    against_ms: tuple[float, ...] = ()
    #: Tokens that a call puts out.
    num_tokens: int = 0

    @property
    def median_ms(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured:
    """A row without a figure; `is_failure` if one was expected."""

    why: str
    is_failure: bool = False


Finding = Measured | NotMeasured


class Figure(Enum):
    """The kind of figure that a row shows."""

    OF_COPY = "share of the copy bandwidth"
    OF_MATMUL = "share of the matmul peak"
    TFLOPS = "TFLOP/s"
    GB_PER_S = "GB/s"
    #: The other's time divided by ours.
    TIMES_FASTER = "times faster"
    #: Our time divided by the other's.
    TIMES_SLOWER = "times slower"
    #: The same of their 99th percentiles.
    TAIL_SLOWER = "times slower (p99)"
    #: Share of our time beyond the other's.
    IDLE = "share of the time"
    #: Tokens that come out.
    TOKENS_PER_S = "tokens/s"
    #: Our time.
    MS = "ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table."""

    key: str
    what: str
    figure: Figure
    #: Lower bound, or for `TIMES_SLOWER` and `MS` upper bound; None: the row is only monitored.
    bound: float | None
    #: Text in place of the bound's number.
    bound_text: str | None = None

    def value(self, measured: Measured, ceilings: Ceilings) -> float:
        """The row's figure."""
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
            case Figure.TAIL_SLOWER:
                return _p99(measured.samples_ms) / _p99(measured.against_ms)
            case Figure.IDLE:
                return 1 - statistics.median(measured.against_ms) / ms
            case Figure.TOKENS_PER_S:
                return measured.num_tokens / ms * 1e3
            case Figure.MS:
                return ms

    @property
    def _is_upper_bound(self) -> bool:
        return self.figure in (Figure.TIMES_SLOWER, Figure.TAIL_SLOWER, Figure.MS)

    def is_reached(self, value: float) -> bool | None:
        """Whether the bound is met; None if the row is only monitored."""
        if self.bound is None:
            return None
        return value <= self.bound if self._is_upper_bound else value >= self.bound

    def show(self, value: float) -> str:
        """Formats a figure."""
        match self.figure:
            case Figure.OF_COPY | Figure.OF_MATMUL | Figure.IDLE:
                return f"{100 * value:.0f} %"
            case Figure.TIMES_FASTER | Figure.TIMES_SLOWER | Figure.TAIL_SLOWER:
                return f"{value:.2f}x"
            case _:
                return f"{value:.3g} {self.figure.value}"

    @property
    def shown_bound(self) -> str:
        """The bound as text."""
        if self.bound is None:
            return self.bound_text or "–"
        return f"{'at most' if self._is_upper_bound else 'at least'} {self.show(self.bound)}"


def _p99(samples_ms: Sequence[float]) -> float:
    return statistics.quantiles(samples_ms, n=100, method="inclusive")[-1] if len(samples_ms) > 1 else samples_ms[0]


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
        what="16 requests, 512 in, 64 out: throughput against transformers' continuous batching, same weights",
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
        key="deterministic-prefill",
        what="deterministic mode, prefill of 8k tokens: against fast mode",
        figure=Figure.TIMES_SLOWER,
        bound=1.1,
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
    Row(
        key="handover-128-exposed",
        what="KV handover of 1k tokens (128 MiB): time after the last kernel that nothing hides",
        figure=Figure.MS,
        bound=1.0,
    ),
    Row(
        key="requests-64-at-once",
        what="64 requests at once through the engine, 1,024 in, 128 out, deterministic",
        figure=Figure.TOKENS_PER_S,
        bound=3300.0,
    ),
    # Rows without a bound: components of others, and monitored figures.
    Row(
        key="requests-16-at-once",
        what="16 such requests at once",
        figure=Figure.TOKENS_PER_S,
        bound=None,
    ),
    Row(
        key="requests-256-at-once",
        what="256 such requests at once",
        figure=Figure.TOKENS_PER_S,
        bound=None,
    ),
    Row(
        key="handover-128",
        what="KV handover of 1k tokens (128 MiB), all of them computed",
        figure=Figure.GB_PER_S,
        bound=None,
    ),
    Row(
        key="handover-64-at-once",
        what="64 such handovers at once",
        figure=Figure.GB_PER_S,
        bound=None,
    ),
    Row(
        key="decode-during-handovers",
        what="decode step, batch 64, context 2k, during such handovers: p99 against that of steps alone",
        figure=Figure.TAIL_SLOWER,
        bound=None,
    ),
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
        key="gather",
        what="copying them from blocks into other blocks, with digests: share of the copy bandwidth",
        figure=Figure.OF_COPY,
        bound=None,
    ),
    Row(
        key="digest",
        what="digests alone: share of the copy bandwidth",
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
