"""The picture of latency over request rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.bench.metrics import METRICS, Metrics, summarize
from pdserve.cli.bench.plot import plot_latencies
from pdserve.cli.bench.workload import BenchResult, RequestFailure, RequestRecord


def _run(ttft_s: float) -> Metrics:
    record = RequestRecord(start_s=0, end_s=ttft_s + 1, arrivals_s=(ttft_s, ttft_s + 1), output_tokens=2)
    return summarize(BenchResult(duration_s=1.0, records=(record,)), percentiles=(50.0, 99.0))


FAILED_RECORD = RequestRecord(start_s=0, end_s=1, failure=RequestFailure(reason="timeout", message=""))
FAILED = summarize(
    BenchResult(
        duration_s=1.0,
        records=(FAILED_RECORD,),
    )
)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[float], list[float]]]:
    """Lines of the picture: label, rates, milliseconds."""
    import matplotlib.axes  # Takes most of a second, in each process that collects this file.

    plotted = []
    usual = matplotlib.axes.Axes.plot

    def plot(self: Any, x: Sequence[float], y: Sequence[float], **style: Any) -> Any:
        plotted.append((style["label"], list(x), list(y)))
        return usual(self, x, y, **style)

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", plot)
    return plotted


def test_each_percentile_is_a_line_over_ascending_rates(
    tmp_path: Path, lines: list[tuple[str, list[float], list[float]]]
) -> None:
    path = tmp_path / "new" / "p.png"
    plot_latencies(path, [4.0, 1.0, 2.0], [_run(0.4), _run(0.1), _run(0.2)], latencies=("ttft",), title="tiny")
    assert [(label, rates) for label, rates, _ in lines] == [("P50", [1, 2, 4]), ("P99", [1, 2, 4])]
    assert lines[0][2] == pytest.approx([100, 200, 400])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_rates_at_which_all_requests_failed_have_no_point(
    tmp_path: Path, lines: list[tuple[str, list[float], list[float]]]
) -> None:
    plot_latencies(tmp_path / "p.png", [1.0, 2.0], [_run(0.1), FAILED], latencies=METRICS, title="tiny")
    assert {tuple(rates) for _, rates, _ in lines} == {(1.0,)}
    assert len(lines) == 2 * len(METRICS)


def test_a_picture_without_samples_is_still_a_picture(tmp_path: Path) -> None:
    plot_latencies(tmp_path / "p.png", [1.0, 2.0], [FAILED, FAILED], latencies=("ttft", "itl"), title="tiny")
    assert (tmp_path / "p.png").stat().st_size > 0


@pytest.mark.parametrize("name", ["p.nothing", "taken/p.png"])
def test_a_picture_that_cannot_be_written_is_named_in_the_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(SetupError, match="Cannot write the picture"):
        plot_latencies(tmp_path / name, [1.0, 2.0], [_run(0.1), _run(0.2)], latencies=("ttft",), title="tiny")
