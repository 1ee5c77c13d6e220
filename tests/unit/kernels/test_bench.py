"""The kernels' benchmark on a tiny model: checks what it measures, not the speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels.bench import __main__ as bench
from kernels.bench import cases
from kernels.bench.measure import Limits
from kernels.bench.shapes import LLAMA_8B, SHAPES
from kernels.bench.work import Work, attention_work, decoder_work
from kernels.choice import instruction_sets
from kernels.decoder import DecoderShape
from pdserve.cli.bench import kernels as command
from tests.unit.kernels.cpu_ops import needs_kernels

TINY = DecoderShape(
    hidden_size=48,
    intermediate_size=80,
    vocab_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    windows=(None, None),
)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tiny model and little memory; restores torch's number of threads."""
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(cases, "_WALKED_BYTES", 1 << 14)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.usefixtures("tiny")
def test_every_op_is_measured_against_reference_and_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert bench.main(["--shapes", "tiny", "--threads", "1", "--rounds", "1", "--json", str(path)]) == 0
    result = json.loads(path.read_text(encoding="utf-8"))
    lines = result["results"]
    assert {line["op"] for line in lines} == {
        *("qkv", "gate_up_silu", "down", "lm_head"),
        *("norm", "rope_write_kv", "attention", "decoder"),
    }
    assert {line["format"] for line in lines if line["op"] == "qkv"} == {"bf16", "int8", "f32"}
    for line in lines:
        assert min(line[name] for name in ("us", "gb_per_s", "gflop_per_s", "share_of_limit", "times_reference")) > 0
    shown = capsys.readouterr().out
    assert all(f"{line['us']:.1f}" in shown for line in lines)
    assert result["limits"][0]["threads"] == 1


@needs_kernels
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("isa", instruction_sets())
def test_both_sides_of_a_case_compute_the_same(isa: str) -> None:
    torch.manual_seed(0)
    setting = cases.Setting(shape=TINY, instruction_set=isa, threads=1)
    with torch.inference_mode():
        for case in cases.decoder(setting):
            assert case.reference is not None
            ours, theirs = case.call(), case.reference()
            assert isinstance(ours, torch.Tensor)
            assert isinstance(theirs, torch.Tensor)
            # Logits are about 1, and the two backends round to bfloat16 at different points.
            assert (ours - theirs).abs().mean() < 0.06, case.size


def test_the_limit_is_memory_or_multipliers_whichever_takes_longer() -> None:
    limits = Limits(threads=1, read_gb_per_s=10.0, bf16_gflop_per_s=100.0, f32_gflop_per_s=50.0)
    assert limits.least_us(Work(num_bytes=1e6, flops=1e6), "bf16") == pytest.approx(100.0)
    assert limits.least_us(Work(num_bytes=1e3, flops=1e9), "int8") == pytest.approx(10_000.0)
    assert limits.least_us(Work(num_bytes=1e3, flops=1e9), "f32") == pytest.approx(20_000.0)


def test_the_better_of_two_measured_limits_counts() -> None:
    one = Limits(threads=2, read_gb_per_s=10.0, bf16_gflop_per_s=100.0, f32_gflop_per_s=50.0)
    other = Limits(threads=2, read_gb_per_s=20.0, bf16_gflop_per_s=90.0, f32_gflop_per_s=60.0)
    best = Limits(threads=2, read_gb_per_s=20.0, bf16_gflop_per_s=100.0, f32_gflop_per_s=60.0)
    assert one.best(other) == other.best(one) == best


@needs_kernels
def test_the_command_passes_arguments_and_exit_code(capfd: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--ops", "linear,dancing"]) == 2
    assert "dancing: not among linear, rows, attention, decoder" in capfd.readouterr().err


def test_attention_reads_contexts_once_and_multiplies_visible_keys() -> None:
    # One row over 10 tokens, and a chunk of 3 rows behind 5 tokens, which see 6, 7 and 8.
    work = attention_work(TINY, [(1, 10), (3, 8)], 2)
    assert work.num_bytes == (10 + 8) * 2 * TINY.num_kv_heads * TINY.head_dim * 2
    assert work.flops == 4 * (10 + 6 + 7 + 8) * TINY.num_heads * TINY.head_dim


def test_the_last_layer_and_the_head_count_for_rows_with_logits_alone() -> None:
    hidden, width, kv_width = TINY.hidden_size, TINY.num_heads * TINY.head_dim, TINY.num_kv_heads * TINY.head_dim
    qkv, others = hidden * (width + 2 * kv_width), hidden * width + 3 * hidden * TINY.intermediate_size
    spans = [(4, 4), (1, 9)]
    attention = attention_work(TINY, spans, 2)
    work = decoder_work(TINY, spans, 2, weight_bytes=1000)
    assert work.num_bytes == 1000 + 2 * attention.num_bytes
    head = TINY.vocab_size * hidden
    assert work.flops == 2 * (5 * (2 * qkv + others) + 2 * (others + head)) + 2 * attention.flops


def test_the_large_model_has_eight_billion_parameters() -> None:
    step = decoder_work(LLAMA_8B, [(1, 1)], 2, weight_bytes=0)
    # All of its 8.03 billion parameters are multiplied, except for the embedding.
    assert step.flops / 2 == pytest.approx(8.03e9 - LLAMA_8B.vocab_size * LLAMA_8B.hidden_size, rel=0.001)
    assert attention_work(LLAMA_8B, [(1, 8192)], 2).times(32).num_bytes == 1 << 30
