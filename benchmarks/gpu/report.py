"""Formats the table and the rooflines as Markdown, and all measurements as JSON. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from benchmarks.gpu.rows import Ceilings, Finding, Measured, NotMeasured, Row

_NO_FIGURE = "–"
_REACHED = {True: "reached", False: "**not reached**", None: ""}


def table(rows: Sequence[Row], findings: Mapping[str, Finding], ceilings: Ceilings) -> str:
    """One line per row: the figure and its bound, or the reason for a missing figure."""
    lines = ["| what | measured | wanted | |", "| --- | ---: | ---: | --- |"]
    return "\n".join(lines + [_line(row, findings[row.key], ceilings) for row in rows])


def _line(row: Row, finding: Finding, ceilings: Ceilings) -> str:
    if isinstance(finding, NotMeasured):
        state = "**failed**" if finding.is_failure else "not measured"
        return f"| {row.what} | {_NO_FIGURE} | {row.shown_bound} | {state}: {_cell(finding.why)} |"
    value = row.value(finding, ceilings)
    return f"| {row.what} | {row.show(value)} | {row.shown_bound} | {_REACHED[row.is_reached(value)]} |"


def rooflines(rows: Sequence[Row], findings: Mapping[str, Finding], ceilings: Ceilings) -> str:
    """Bytes and operations of each row, their time at the ceilings, and the measured time."""
    lines = [
        f"Ceilings, measured in this run: device copy {ceilings.copy_gb_per_s:.0f} GB/s (read plus written), bfloat16 "
        f"product {ceilings.matmul_tflop_per_s:.0f} TFLOP/s.\n",
        "| row | GB | TFLOP | limited by | at least | measured (least … most) | gap | how |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    return "\n".join(
        lines + [_roofline(row, findings[row.key], ceilings) for row in rows if isinstance(findings[row.key], Measured)]
    )


def _roofline(row: Row, measured: Finding, ceilings: Ceilings) -> str:
    assert isinstance(measured, Measured)
    work, least_ms = measured.work, ceilings.least_ms(measured.work)
    limit = "memory" if ceilings.copy_ms(work) >= ceilings.matmul_ms(work) else "multiplications"
    cells = (
        row.key,
        f"{work.num_bytes / 1e9:.3g}",
        f"{work.flops / 1e12:.3g}",
        limit,
        f"{least_ms:.3g} ms",
        _spread(measured.samples_ms),
        f"{measured.median_ms / least_ms:.2f}x",
        _cell(measured.how) + (f"; compared with {_spread(measured.against_ms)}" if measured.against_ms else ""),
    )
    return f"| {' | '.join(cells)} |"


def raw(rows: Sequence[Row], findings: Mapping[str, Finding], ceilings: Ceilings) -> list[dict[str, object]]:
    """All measurements, as JSON values."""
    return [_raw(row, findings[row.key], ceilings) for row in rows]


def _raw(row: Row, finding: Finding, ceilings: Ceilings) -> dict[str, object]:
    about: dict[str, object] = {"key": row.key, "what": row.what, "figure": row.figure.value, "bound": row.bound}
    if isinstance(finding, NotMeasured):
        return about | {"value": None, "is_reached": None, "not_measured": asdict(finding)}
    value = row.value(finding, ceilings)
    roofline = {"least_ms": ceilings.least_ms(finding.work), "median_ms": finding.median_ms}
    return about | {"value": value, "is_reached": row.is_reached(value)} | roofline | asdict(finding)


def _spread(samples_ms: Sequence[float]) -> str:
    return f"{statistics.median(samples_ms):.3g} ms ({min(samples_ms):.3g} … {max(samples_ms):.3g})"


def _cell(text: str) -> str:
    """Makes text fit into one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
