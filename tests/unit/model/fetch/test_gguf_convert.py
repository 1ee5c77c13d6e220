"""A checkpoint survives the round trip through GGUF, in bfloat16."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pdserve.base.errors import SetupError
from pdserve.model.chat_template import ChatTemplate
from pdserve.model.config import ModelConfig
from pdserve.model.fetch.gguf_convert import convert_gguf
from pdserve.model.fetch.progress import silent
from pdserve.model.loader import load_decoder
from pdserve.model.tokenizer_file import read_tokenizer
from router_svc.api.sampling_defaults import SamplingDefaults
from tests.golden.paged import generate_greedily
from tests.unit.model.fetch.gguf_files import write_model
from tests.unit.model.tiny import LLAMA, random_tensors

QWEN2 = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}


def converted(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "model.gguf", out, silent)
    return out


@pytest.mark.parametrize(
    ("architecture", "values"),
    [("llama", LLAMA), ("llama", LLAMA | {"tie_word_embeddings": True}), ("qwen2", QWEN2), ("qwen3", QWEN3)],
)
def test_weights_and_config_survive_the_round_trip(
    tmp_path: Path, architecture: str, values: dict[str, object]
) -> None:
    config = ModelConfig.from_hf(values)
    tensors = random_tensors(config)
    write_model(tmp_path / "model.gguf", architecture, config, tensors)
    out = converted(tmp_path)
    back = load_file(out / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(back[name], tensor.to(torch.bfloat16)), name
    read = ModelConfig.from_dir(out)
    assert read.dtype == "bfloat16"
    assert (read.head_dim, read.rope, read.rms_norm_eps, read.tie_word_embeddings, read.eos_token_ids) == (
        config.head_dim,
        config.rope,
        config.rms_norm_eps,
        config.tie_word_embeddings,
        (0,),
    )


def test_a_converted_directory_generates_text(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(LLAMA)
    write_model(tmp_path / "model.gguf", "llama", config, random_tensors(config))
    out = converted(tmp_path)
    tokenizer = read_tokenizer(out)
    prompt = tokenizer.encode(ChatTemplate.from_dir(out).render([{"role": "user", "content": "HELLO"}]))
    assert len(prompt) == 5
    outputs, _ = generate_greedily(load_decoder(out), [prompt], 4)
    assert tokenizer.decode(outputs[0], skip_special_tokens=False)


def test_the_template_for_conversations_with_tools_is_kept(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(LLAMA)
    keys = {"tokenizer.chat_template.tool_use": "tools: {{ tools }}", "tokenizer.chat_template.rag": "documents"}
    write_model(tmp_path / "model.gguf", "llama", config, random_tensors(config), others=keys)
    out = converted(tmp_path)
    convert_gguf(tmp_path / "model.gguf", out, silent)  # As when the first try was interrupted.
    template = ChatTemplate.from_dir(out)
    assert template.render([{"role": "user", "content": "HELLO"}]) == "HELLO"
    assert template.for_tools is not None
    assert template.for_tools.render([], tools=[]) == "tools: []"


def test_frequency_divisors_become_rope_parameters(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(LLAMA)
    factors = [1.0, 2.0, 4.0, 8.0]
    write_model(tmp_path / "model.gguf", "llama", config, random_tensors(config), rope_factors=factors)
    rope = ModelConfig.from_dir(converted(tmp_path)).rope
    assert rope.short_factor == rope.long_factor == tuple(factors)
    assert rope.attention_factor == 1.0


def test_rope_scaling_is_converted(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(LLAMA)
    extra: dict[str, str | float | int] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    write_model(tmp_path / "model.gguf", "llama", config, random_tensors(config), extra)
    rope = ModelConfig.from_dir(converted(tmp_path)).rope
    assert (rope.rope_type, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 128)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_scales_linearly_as_in_llama_cpp(tmp_path: Path, key: str) -> None:
    config = ModelConfig.from_hf(LLAMA)
    write_model(tmp_path / "model.gguf", "llama", config, random_tensors(config), {key: 4.0})
    rope = ModelConfig.from_dir(converted(tmp_path)).rope
    assert (rope.rope_type, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [
        ("gemma", {}, "architecture 'gemma' is not supported; supported: llama, qwen2, qwen3"),
        ("llama", {"expert_count": 8}, "mixture-of-experts models are not supported"),
        ("llama", {"rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ("llama", {"attention.value_length": 4}, "attention.value_length 4 is not supported; supported: .* 8"),
        ("llama", {"attention.sliding_window": 64}, "attention.sliding_window is not supported .supported: 0"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is not supported"),
        ("llama", {"rope.dimension_count": 4}, "rope.dimension_count 4 is not supported; supported: .* 8"),
    ],
)
def test_an_unsupported_feature_is_named(
    tmp_path: Path, architecture: str, extra: dict[str, str | float | int], message: str
) -> None:
    config = ModelConfig.from_hf(LLAMA)
    write_model(tmp_path / "model.gguf", architecture, config, random_tensors(config), extra)
    with pytest.raises(SetupError, match=message):
        converted(tmp_path)


def test_the_sampling_and_every_end_that_a_file_names_are_those_of_the_model(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(LLAMA)
    keys: dict[str, str | float | int] = {
        "general.sampling.temp": -1.0,
        "general.sampling.top_p": 0.95,
        "general.sampling.top_k": 20,
        "general.sampling.penalty_repeat": 1.25,
        "tokenizer.ggml.eot_token_id": 3,
        "tokenizer.ggml.eom_token_id": 4,
    }
    write_model(tmp_path / "model.gguf", "llama", config, random_tensors(config), others=keys)
    out = converted(tmp_path)
    defaults = SamplingDefaults.from_dir(out)
    assert (defaults.temperature, defaults.top_p, defaults.top_k, defaults.repetition_penalty) == (0.0, 0.95, 20, 1.25)
    assert ModelConfig.from_dir(out).eos_token_ids == (0, 3, 4)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(LLAMA)
    tensors = random_tensors(config)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_model(tmp_path / "model.gguf", "llama", config, tensors)
    with pytest.raises(SetupError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        converted(tmp_path)
    with_norms = ModelConfig.from_hf(QWEN3)
    write_model(tmp_path / "model.gguf", "qwen2", with_norms, random_tensors(with_norms))
    (tmp_path / "out").rmdir()
    with pytest.raises(SetupError, match="q_norm"):
        converted(tmp_path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(LLAMA)
    tensors = random_tensors(config)
    tensors["model.norm.weight"][3] = torch.nan
    write_model(tmp_path / "model.gguf", "llama", config, tensors)
    with pytest.raises(SetupError, match=r"output_norm\.weight has values that are not finite"):
        converted(tmp_path)


def test_progress_rises_from_zero_to_the_total(tmp_path: Path) -> None:
    config = ModelConfig.from_hf(LLAMA)
    write_model(tmp_path / "model.gguf", "llama", config, random_tensors(config))
    (tmp_path / "out").mkdir()
    seen: list[tuple[int, int | None]] = []
    convert_gguf(tmp_path / "model.gguf", tmp_path / "out", lambda _, done, total: seen.append((done, total)))
    assert seen[0][0] == 0
    assert seen[-1][0] == seen[-1][1]
    assert seen == sorted(seen)
    header = int.from_bytes((tmp_path / "out" / "model.safetensors").read_bytes()[:8], "little")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size == 8 + header + (seen[-1][1] or 0)
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["eos_token"] == "<|end|>"
