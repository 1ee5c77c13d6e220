"""Plots latency over request rate. matplotlib is imported only here, and only when a plot is requested."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.cli.bench.metrics import Metrics
from pdserve.cli.bench.report import TITLES

_PANEL_INCHES = (4.5, 3.2)
_COLUMNS = 2
#: Range of shades, from the lowest percentile (light) to the highest (dark).
_SHADES = (0.4, 0.95)


def require_matplotlib() -> None:
    """Raises `SetupError` if matplotlib is not installed. Call it before a long run."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SetupError("--plot needs matplotlib. Install it with: pip install 'pdserve[bench]'.")


def plot_latencies(
    path: Path, rates: Sequence[float], runs: Sequence[Metrics], *, latencies: Sequence[str], title: str
) -> None:
    """Writes a picture with a panel per latency, a line per percentile and a point per rate.

    `rates[i]` is the rate of `runs[i]`; the order is free. Raises `SetupError` when the file cannot be written.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ordered = sorted(zip(rates, runs, strict=True), key=lambda pair: pair[0])
    rows = -(-len(latencies) // _COLUMNS)
    columns = min(_COLUMNS, len(latencies))
    figure = Figure(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows), layout="constrained")
    figure.suptitle(title)
    shades = mpl.colormaps["Blues"]
    for index, metric in enumerate(latencies):
        panel = figure.add_subplot(rows, columns, index + 1)
        panel.set(title=TITLES[metric], xlabel="requests per second", ylabel="ms")
        lines = _lines(metric, ordered)
        for rank, (percent, points) in enumerate(sorted(lines.items())):
            at_rates, values_ms = zip(*points, strict=True)
            color = shades(_shade(rank, len(lines)))
            panel.plot(at_rates, values_ms, marker="o", markersize=4, color=color, label=f"P{percent:g}")
        panel.set_ylim(bottom=0)
        panel.set_xlim(left=0)
        panel.grid(alpha=0.3)
        if lines:
            panel.legend(frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise SetupError(f"Cannot write the picture {path}: {error}.") from error


def _lines(metric: str, ordered: Sequence[tuple[float, Metrics]]) -> dict[float, list[tuple[float, float]]]:
    """Points (requests per second, milliseconds) by percentile; rates without samples have none."""
    lines: dict[float, list[tuple[float, float]]] = {}
    for rate, metrics in ordered:
        if metric in metrics.latencies:
            for percent, value_ms in metrics.latencies[metric].percentiles_ms.items():
                lines.setdefault(percent, []).append((rate, value_ms))
    return lines


def _shade(rank: int, count: int) -> float:
    lightest, darkest = _SHADES
    return darkest - (darkest - lightest) * (count - 1 - rank) / max(1, count - 1)
