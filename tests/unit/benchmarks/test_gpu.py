"""The GPU benchmark: its arithmetic, its tables, and a run of every row on tiny shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.generation import Generation
from benchmarks.gpu.measure import Clock, measure_ceilings
from benchmarks.gpu.report import raw, rooflines, table
from benchmarks.gpu.rows import ROWS, Ceilings, Figure, Finding, Measured, NotMeasured, Row
from benchmarks.gpu.setting import REFERENCE, TINY, Setting
from benchmarks.gpu.transformers_peer import build
from kernels.bench.inputs import BLOCK_SIZE, blocks_of, kv_rows
from kernels.bench.work import Work
from tests.support.depth import IS_FULL

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
#: A byte takes as long as 200 operations.
CEILINGS = Ceilings(copy_gb_per_s=4000.0, matmul_tflop_per_s=800.0)


def _row(figure: Figure, bound: float | None = 0.8) -> Row:
    return Row(key="row", what="what", figure=figure, bound=bound)


def _measured(*samples_ms: float, num_bytes: float = 0.0, flops: float = 0.0, against: float = 0.0) -> Measured:
    work = Work(num_bytes=num_bytes, flops=flops)
    return Measured(samples_ms=samples_ms, work=work, how="so", against_ms=(against,) if against else ())


@pytest.mark.parametrize(
    ("figure", "measured", "value"),
    [
        # 4 GB take 1 ms at 4,000 GB/s.
        (Figure.OF_COPY, _measured(2.0, num_bytes=4e9, flops=1e9), 0.5),
        (Figure.OF_MATMUL, _measured(9.0, 2.0, 1.0, num_bytes=4e9, flops=8e11), 0.5),
        (Figure.TFLOPS, _measured(2.0, flops=8e11), 400.0),
        (Figure.GB_PER_S, _measured(4.0, num_bytes=1e9), 250.0),
        (Figure.TOKENS_PER_S, replace(_measured(2.0), num_tokens=7), 3500.0),
        (Figure.TIMES_FASTER, _measured(2.0, against=7.0), 3.5),
        (Figure.TIMES_SLOWER, _measured(3.0, against=2.0), 1.5),
        (Figure.IDLE, _measured(4.0, against=3.0), 0.25),
    ],
)
def test_a_figure_follows_from_median_work_and_ceilings(figure: Figure, measured: Measured, value: float) -> None:
    assert _row(figure).value(measured, CEILINGS) == pytest.approx(value)


def test_bounds_are_lower_bounds_except_for_times() -> None:
    assert _row(Figure.OF_COPY).is_reached(0.8)
    assert _row(Figure.OF_COPY).is_reached(0.799) is False
    assert _row(Figure.TIMES_SLOWER, 1.4).is_reached(1.4)
    assert _row(Figure.TIMES_SLOWER, 1.4).is_reached(1.41) is False
    assert _row(Figure.MS, 1.0).is_reached(1.0)
    assert _row(Figure.MS, 1.0).is_reached(1.1) is False
    assert _row(Figure.OF_COPY, None).is_reached(0.1) is None


def test_the_lower_bound_of_time_is_memory_or_multiplications() -> None:
    assert CEILINGS.least_ms(Work(num_bytes=4e9, flops=8e11)) == pytest.approx(1.0)
    assert CEILINGS.least_ms(Work(num_bytes=8e9, flops=8e11)) == pytest.approx(2.0)
    assert CEILINGS.least_ms(Work(num_bytes=8e9, flops=3.2e12)) == pytest.approx(4.0)
    lower = replace(CEILINGS, copy_gb_per_s=1.0)
    assert lower.best(replace(CEILINGS, matmul_tflop_per_s=1.0)) == CEILINGS


def test_the_tables_show_figures_and_reasons_for_missing_ones() -> None:
    rows = [
        replace(_row(Figure.OF_COPY), key="good"),
        replace(_row(Figure.OF_MATMUL), key="short"),
        replace(_row(Figure.TIMES_SLOWER, 1.4), key="missing"),
        replace(_row(Figure.MS, None), key="broken", bound_text="one layer group"),
    ]
    findings: dict[str, Finding] = {
        "good": _measured(1.0, num_bytes=3.6e9),
        "short": _measured(2.0, flops=8e11),
        "missing": NotMeasured(why="no | peer\nhere"),
        "broken": NotMeasured(why="ValueError: no", is_failure=True),
    }
    lines = table(rows, findings, CEILINGS).splitlines()
    assert lines[2:] == [
        "| what | 90 % | at least 80 % | reached |",
        "| what | 50 % | at least 80 % | **not reached** |",
        "| what | – | at most 1.40x | not measured: no \\| peer here |",
        "| what | – | one layer group | **failed**: ValueError: no |",
    ]
    text = rooflines(rows, findings, CEILINGS)
    assert "| good | 3.6 | 0 | memory | 0.9 ms | 1 ms (1 … 1) | 1.11x | so |" in text
    assert "| short | 0 | 0.8 | multiplications | 1 ms | 2 ms (2 … 2) | 2.00x | so |" in text
    assert "missing" not in text
    found = raw(rows, findings, CEILINGS)
    assert [row["is_reached"] for row in found] == [True, False, None, None]
    assert found[0]["value"] == pytest.approx(0.9)
    assert found[2]["not_measured"] == {"why": "no | peer\nhere", "is_failure": False}


def test_every_row_is_measured_and_has_a_bound_or_is_monitored() -> None:
    assert set(command._measures(Setting(REFERENCE, TINY, CPU))) == {row.key for row in ROWS}
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert {row.key: row.bound for row in ROWS if row.bound is not None} == {
        "decode-attention-4k": 0.8,
        "decode-attention-32k": 0.8,
        "prefill-attention": 450.0,
        "requests-64-at-once": 3300.0,
        "decode-1": 0.8,
        "decode-64": 0.75,
        "prefill": 0.6,
        "transformers": 3.0,
        "deterministic": 1.4,
        "deterministic-prefill": 1.1,
        "handover": 300.0,
        "handover-128-exposed": 1.0,
    }


def test_a_failed_row_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Finding:
        raise ValueError("it broke")

    monkeypatch.setattr(command, "_measures", lambda _: {"row": broken})
    finding = command._find(_row(Figure.OF_COPY), Setting(REFERENCE, TINY, CPU))
    assert finding == NotMeasured(why="ValueError: it broke", is_failure=True)
    assert "it broke" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "--dry-run" in capsys.readouterr().err


def test_ceilings_count_bytes_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(CPU, 1)
    monkeypatch.setattr(clock, "samples_ms", lambda call: (call() is None, 2.0, 2.0)[1:])
    ceilings = measure_ceilings(clock, CPU, copy_bytes=1 << 20, matmul_size=8)
    assert ceilings.copy_gb_per_s == pytest.approx(2 * 2**20 / 2e-3 / 1e9)
    assert ceilings.matmul_tflop_per_s == pytest.approx(2 * 8**3 / 2e-3 / 1e12)


@pytest.mark.parametrize("is_scattered", [False, True])
def test_sequences_share_no_block(is_scattered: bool) -> None:
    spans = [(1, 33), (20, 20)]
    rows = kv_rows(spans, is_scattered=is_scattered)
    assert sorted(rows.block_tables.flatten().tolist()) == list(range(1, blocks_of(spans)))
    assert rows.query_starts.tolist() == [0, 1, 21]
    assert rows.positions.tolist() == [32, *range(20)]
    assert rows.slot_mapping[0] == rows.block_tables[0, 2] * BLOCK_SIZE
    assert rows.slot_mapping[-1] == rows.block_tables[1, 1] * BLOCK_SIZE + 3


@torch.no_grad()
def test_the_loop_and_the_peer_generate_the_same_tokens() -> None:
    setting = Setting(REFERENCE, replace(TINY, prefill_tokens=20), CPU)
    prompts = torch.randint(0, TINY.shape.vocab_size, (3, 9), generator=torch.Generator().manual_seed(0))
    generation = Generation(setting, 3, 9, 5)
    generation.run(prompts.flip(0))
    ours = generation.run(prompts)
    peer = build(setting.shape, setting.weights, CPU)
    assert peer.lm_head.weight.data_ptr() == setting.weights.lm_head.data_ptr()
    tokens = torch.cat((prompts, ours), 1)
    logits = peer(tokens).logits.float()[:, 8:-1]
    # Teacher-forced: each of our tokens is the peer's best, but for how the two round.
    best = logits.max(-1).values
    assert (best - logits.gather(2, ours.unsqueeze(2)).squeeze(2) < 0.05).all()
    total = generation.work(setting)
    assert total.num_bytes > (2 + 4) * setting.decoder(deterministic=False).weight_bytes


@pytest.mark.skipif(not IS_FULL, reason="one of many cases: `make test-all ARGS=full-depth` runs it")
def test_the_dry_run_runs_every_row_and_writes_no_file(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    # Whole models are three quarters of the time. test_gpu_simulated.py and the tests below run parts of their rows.
    rows = [row for row in ROWS if IS_FULL or not row.key.startswith(("idle-", "transformers"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    out = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--only", ",".join(row.key for row in rows)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    assert out.returncode == 0, out.stderr
    assert all(row.what in out.stdout for row in rows)
    assert "failed" not in out.stdout
    # What needs two GPUs, and the peer, which needs one.
    assert out.stdout.count("| not measured: ") == 1 + ("transformers" in {row.key for row in rows})
    assert "not measured: fewer than two GPUs" in out.stdout
    assert not list(tmp_path.iterdir())
