"""Sizes come from the config alone, what does not fit is named, and measured speeds replace assumed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import SetupError
from pdserve.cli.__main__ import main
from pdserve.cli.model_sizes import SizeOptions, model_sizes
from pdserve.cli.plan import PlanConfig, make_plan
from pdserve.cli.plan.profile import parse_profile
from pdserve.cli.plan.report import Plan
from pdserve.model.config import ModelConfig

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
QWEN_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
GB = 1_000_000_000


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return str(tmp_path)


def plan_of(model: str, **settings: Any) -> Plan:
    return make_plan(
        PlanConfig(model=model, **{"gpu_memory": 80 * GB, "isl": 2000, "osl": 500, "rate": 10.0} | settings)
    )


@pytest.mark.parametrize(("config", "parameters"), [(LLAMA_8B, 8_030_261_248), (QWEN_05B, 494_032_768)])
def test_parameters_are_counted_to_the_last_one(config: dict[str, Any], parameters: int) -> None:
    sizes = model_sizes(ModelConfig.from_hf(config), SizeOptions())
    assert sizes.num_parameters == parameters
    assert sizes.weight_bytes == 2 * parameters


def test_kv_is_that_of_the_workers_layout() -> None:
    config = ModelConfig.from_hf(LLAMA_8B)
    for kv_dtype, per_token in (("auto", 131072), ("float32", 262144), ("fp8_e4m3", 65536)):
        sizes = model_sizes(config, SizeOptions(kv_cache_dtype=kv_dtype))
        layout = config.kv_layout(fingerprint="f", dtype=kv_dtype, block_size=16)
        assert sizes.kv_bytes_per_token == per_token
        assert sizes.block_bytes == layout.block_bytes


@pytest.mark.parametrize(
    ("dtype", "instruction_set", "item_bytes"),
    [("bfloat16", "avx512", 1.5), ("bfloat16", "avx2", 2), ("float16", "avx512", 4), ("float32", "portable", 4)],
)
def test_packed_weights_take_what_the_documentation_says(dtype: str, instruction_set: str, item_bytes: float) -> None:
    config = ModelConfig.from_hf(LLAMA_8B)
    plain = model_sizes(config, SizeOptions(dtype=dtype))
    packed = model_sizes(config, SizeOptions(dtype=dtype, packed_for=instruction_set))
    embeddings = config.vocab_size * config.hidden_size
    stored = plain.weight_bytes // plain.num_parameters
    assert packed.weight_bytes == embeddings * stored + (plain.num_parameters - embeddings) * item_bytes
    converted = 0 if dtype == config.dtype else embeddings * stored
    assert packed.private_weight_bytes == packed.weight_bytes - embeddings * stored + converted
    assert plain.private_weight_bytes == (0 if dtype == config.dtype else plain.weight_bytes)


def test_int8_weights_take_a_byte_and_a_scale_per_output_feature() -> None:
    config = ModelConfig.from_hf(LLAMA_8B)
    plain = model_sizes(config, SizeOptions()).weight_bytes
    rounded = model_sizes(config, SizeOptions(quantization="int8", packed_for="avx2")).weight_bytes
    embeddings = 128256 * 4096 * 2
    assert embeddings + (plain - embeddings) / 2 < rounded < embeddings + (plain - embeddings) / 2 * 1.01


def test_what_fits_adds_up(model: str) -> None:
    plan = plan_of(model)
    usable = int(80 * GB * 0.88)
    assert plan.fit.usable_bytes == usable
    assert plan.fit.kv_bytes == usable - plan.sizes.weight_bytes - plan.fit.activation_bytes
    assert plan.fit.num_blocks == plan.fit.kv_bytes // plan.sizes.block_bytes
    assert plan.fit.full_sequences == plan.fit.num_blocks // (-(-2500 // 16))
    assert plan.fit.average_sequences == plan.fit.num_blocks // (-(-2250 // 16))


def test_more_load_needs_more_workers_of_its_tier(model: str) -> None:
    plan = plan_of(model)
    long_prompts, long_answers = plan_of(model, isl=8000).workers, plan_of(model, osl=4000).workers
    assert long_prompts.prefill > plan.workers.prefill
    assert long_answers.decode > plan.workers.decode
    assert plan_of(model, cached_share=0.9).workers.prefill < plan.workers.prefill
    double = plan_of(model, rate=20.0).workers
    assert double.prefill_load == pytest.approx(2 * plan.workers.prefill_load)
    assert double.handover_bytes_per_s == pytest.approx(20 * 2000 * 131072)


def test_two_ranks_share_the_weights_and_double_the_speed(model: str) -> None:
    one, two = plan_of(model, gpu_memory=24 * GB), plan_of(model, gpu_memory=24 * GB, tensor_parallel_size=2)
    assert two.fit.kv_bytes - one.fit.kv_bytes == int(24 * GB * 0.88)
    assert two.speeds.prefill_tokens_per_s == pytest.approx(2 * one.speeds.prefill_tokens_per_s)


def test_steps_are_as_large_as_those_of_workers_on_the_device(model: str) -> None:
    on_gpu = plan_of(model)
    assert on_gpu == plan_of(model, max_num_batched_tokens=4096, max_num_seqs=128)
    assert on_gpu.fit != plan_of(model, max_num_batched_tokens=512, max_num_seqs=64).fit


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu_memory": 16 * GB}, r"^The weights do not fit: 16\.1 GB in bfloat16, but a worker can use 14\.1 GB of"),
        ({"gpu_memory": 19 * GB, "max_num_batched_tokens": 60_000}, "^The activations do not fit: "),
        ({"gpu_memory": 24 * GB, "isl": 100_000}, r"^One sequence does not fit: 100500 tokens need 13\.2 GB of KV"),
        ({"isl": 140_000}, "exceeds the model's limit of 131072"),
        ({"tensor_parallel_size": 3}, "does not divide the model's 8 KV heads"),
        ({"quantization": "int8"}, "is for CPU workers"),
        ({"cached_share": 1.0}, "--cached-share is 1"),
        ({"busy_share": 1.5}, "--busy-share is 1.5"),
        ({"profile": "/missing.json"}, "Cannot read the profile /missing.json"),
    ],
)
def test_what_does_not_fit_is_named(model: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        plan_of(model, **settings)


def a_run(**changes: object) -> dict[str, object]:
    return {
        "model_id": "tiny",
        "completed": 10,
        "duration": 20.0,
        "total_input_tokens": 10_000,
        "total_output_tokens": 2_000,
        "output_throughput": 100.0,
        "max_concurrent_requests": 8,
        "median_ttft_ms": 500.0,
        "median_tpot_ms": 40.0,
        **changes,
    }


def test_a_profile_takes_the_best_of_its_runs() -> None:
    runs = {"runs": [a_run(), a_run(output_throughput=300.0, median_tpot_ms=60.0, median_ttft_ms=4000.0)]}
    profile = parse_profile(json.dumps(runs), "f", num_prefill=1, num_decode=2)
    # 1,000 tokens in half a second; 500 per second over the run are fewer.
    assert profile.speeds.prefill_tokens_per_s == 2000
    assert (profile.speeds.decode_tokens_per_s, profile.speeds.decoding, profile.speeds.tpot_s) == (150, 4, 0.06)
    assert (profile.mean_input_tokens, profile.mean_output_tokens, profile.num_runs) == (1000, 200, 2)


def test_prompt_tokens_over_the_run_count_for_each_prefill_worker() -> None:
    run = a_run(duration=1.0, median_ttft_ms=5000.0)
    assert parse_profile(json.dumps(run), "f", num_prefill=4, num_decode=1).speeds.prefill_tokens_per_s == 2500


@pytest.mark.parametrize(
    "text", ["[", "[]", "{}", '{"runs": []}', json.dumps(a_run(median_tpot_ms=None)), json.dumps(a_run(completed=0))]
)
def test_a_file_that_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match="pdserve bench serve"):
        parse_profile(text, "f", num_prefill=1, num_decode=1)


def test_measured_speeds_replace_assumed_ones_and_are_called_so(model: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(a_run()))
    plan = plan_of(model, profile=str(path))
    assert (plan.speeds.prefill_tokens_per_s, plan.speeds.decode_tokens_per_s) == (2000, 100)
    assert plan.workers.prefill_load == pytest.approx(10 * 2000 / 2000)
    assert plan.workers.decode == -(-10 * 500 // 70)
    assert plan.speed_basis == "measured"
    notes = " ".join(plan.assumptions)
    assert "Speeds are measured: 1 runs of tiny" in notes
    assert "Speeds are assumed" not in notes
    # The prompts were half as long as the planned ones.
    assert "measured prompts had 1000 tokens on average, the planned ones have 2000" in notes


def test_the_table_says_what_is_assumed(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", model, "--gpu-memory", "80GB", "--isl", "2000", "--osl", "500", "--rate", "10"]
    assert main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "weights 16.1 GB from the config" in text
    assert "one decode worker, assumed" in text
    assert "Speeds are assumed: 2,000 GB/s" in text
    assert main([*command, "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["sizes"]["num_parameters"] == 8_030_261_248
    assert content["workers"]["decode"] >= 1
    assert main(["plan", model, "--gpu-memory", "16GB"]) == 1
    assert "error: The weights do not fit" in capsys.readouterr().err


def test_without_a_gpu_the_free_memory_counts(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.cli.plan.available_memory_bytes", lambda: 64 * GB)
    plan = plan_of(model, gpu_memory=None, quantization="int8")
    assert plan.fit.usable_bytes == int(64 * GB * 0.88)
    assert "64.0 GB of each rank on this machine, now free" in plan.assumptions[0]
