"""Formats the results of the rows as Markdown. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.peers.rows import MACHINE, MEASURES, Medians, RowResult

#: Maximum share of processor time used by other processes for valid figures.
QUIET_PERCENT = 10.0
_NO_FIGURE = "–"


def table(results: Sequence[RowResult], labels: Mapping[str, str], failures: Mapping[str, Sequence[str]]) -> str:
    """One line per row; `labels` are the systems' names. Reasons for missing figures follow the table."""
    lines = ["| what | pdserve | against | | ratio | at least | |", "| --- | ---: | --- | ---: | ---: | ---: | --- |"]
    lines += [_line(result, labels) for result in results]
    notes = [
        f"- {labels.get(key, key)}: {reason}" for key, reasons in failures.items() for reason in _distinct(reasons)
    ]
    return "\n".join(lines + (["", "Without figures:", "", *notes] if notes else []))


def _line(result: RowResult, labels: Mapping[str, str]) -> str:
    row = result.row
    reached = {True: "reached", False: "**not reached**", None: "not available"}[result.is_reached]
    cells = (
        row.what,
        _shown(row.measure, result.ours),
        labels.get(row.against, row.against),
        _shown(row.measure, result.theirs),
        _NO_FIGURE if result.ratio is None else row.show_ratio(result.ratio),
        row.show_ratio(row.floor),
        reached,
    )
    return f"| {' | '.join(cells)} |"


def quiet(medians: Medians) -> str:
    """A sentence on other load on the machine, which slows servers that spin while they wait most."""
    busy = max(medians.get((MACHINE, "busy_percent"), [0.0]))
    if busy <= QUIET_PERCENT:
        return f"Between the rounds, other processes used at most {busy:.0f} % of the processors."
    return f"**The machine was not quiet: other processes used up to {busy:.0f} % of the processors. Measure again.**"


def everything(medians: Medians, labels: Mapping[str, str]) -> str:
    """All measures, one column per system: the median, and in brackets minimum and maximum of the rounds."""
    measures = [name for name in MEASURES if any(measure == name for _, measure in medians)]
    systems = [key for key in (*labels, MACHINE) if any(system == key for system, _ in medians)]
    lines = ["| | " + " | ".join(labels.get(key, key) for key in systems) + " |", "| --- |" + " ---: |" * len(systems)]
    for name in measures:
        cells = [_spread(name, medians.get((key, name))) for key in systems]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(measure: str, values: Sequence[float] | None) -> str:
    if not values:
        return ""
    middle = statistics.median(values)
    return f"{MEASURES[measure].show(middle)} ({min(values):.3g} … {max(values):.3g})"


def _shown(measure: str, value: float | None) -> str:
    return _NO_FIGURE if value is None else MEASURES[measure].show(value)


def _distinct(reasons: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(reasons))
