"""Reading config.json: supported fields are used, unsupported ones are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.base.errors import LayoutMismatch, SetupError
from pdserve.model.config import ModelConfig
from tests.unit.model.tiny import LLAMA

QWEN = LLAMA | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
MISTRAL = LLAMA | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 128,
}


def test_dimensions_are_read_and_defaults_derived() -> None:
    config = ModelConfig.from_hf({name: value for name, value in LLAMA.items() if name != "num_key_value_heads"})
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 4, 8)
    assert config.layer_windows == (None, None)
    assert config.dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt_neox"}, "model_type gpt_neox"),
        ({"model_type": None, "architectures": ["BertModel"]}, "BertModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor is '4'"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1.0]}}, "short_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 9e299}}, "factor is 9e+299, but must be at most"),
        ({"rope_scaling": {"type": "linear", "factor": 1e290}}, "factor is 1e+290, but must be at most"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types full_attention, sliding_attention is not supported",
        ),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"vocab_size": 2**40}, "vocab_size is 1099511627776"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(changes: dict[str, object], named: str) -> None:
    with pytest.raises(SetupError) as refused:
        ModelConfig.from_hf(LLAMA | changes)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_error_for_an_unknown_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(SetupError, match=r"supported: llama .*, mistral .*, qwen2 .*, qwen3 "):
        ModelConfig.from_hf(LLAMA | {"model_type": "mamba"})


def test_fields_that_transformers_ignores_are_ignored() -> None:
    assert ModelConfig.from_hf(LLAMA | {"unsloth_version": "1", "pretraining_tp": 1}) == ModelConfig.from_hf(LLAMA)


def test_old_and_new_rope_fields_give_the_same_config() -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "llama3", "rope_theta": 5e5, **scaling}
    assert ModelConfig.from_hf(old).rope == ModelConfig.from_hf(new).rope
    assert ModelConfig.from_hf(old).rope.theta == 5e5


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (MISTRAL, (4096, 4096)),
        (MISTRAL | {"sliding_window": None}, (None, None)),
        (MISTRAL | {"sliding_window": 7}, (7, 7)),
        (QWEN | {"sliding_window": 7}, (None, None)),
        (QWEN | {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 1}, (None, 7)),
        (QWEN | {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 0}, (7, 7)),
        (QWEN | {"sliding_window": None, "use_sliding_window": True}, (None, None)),
        (
            QWEN
            | {
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (7, None),
        ),
    ],
)
def test_windows_follow_the_rules_of_each_model_type(
    config: dict[str, object], windows: tuple[int | None, ...]
) -> None:
    assert ModelConfig.from_hf(config).layer_windows == windows


@pytest.mark.parametrize(
    ("scaling", "longest", "default"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256, 256),
        ({"type": "yarn", "factor": 1.5, "original_max_position_embeddings": 128}, 192, 192),
        ({"type": "yarn", "factor": 4.0}, 512, 512),
        ({"type": "linear", "factor": 2.0}, 256, 128),
        ({"type": "dynamic", "factor": 2.0}, 256, 128),
        (LONGROPE, 128, 128),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 128, 128),
    ],
)
def test_the_context_is_as_long_as_its_scaling_has_made_it(
    scaling: dict[str, object], longest: int, default: int
) -> None:
    """Qwen's instructions for long contexts only add the scaling: `max_position_embeddings` keeps the length before."""
    config = ModelConfig.from_hf(LLAMA | {"max_position_embeddings": 128, "rope_scaling": scaling})
    assert (config.max_context, config.default_context) == (longest, default)


def test_qwen2_has_biases_without_a_flag() -> None:
    config = ModelConfig.from_hf(QWEN)
    assert (config.qkv_bias, config.output_bias) == (True, False)


def test_end_of_text_tokens_come_from_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (5, 2)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '"text"'])
def test_a_broken_config_file_is_an_error_of_one_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(SetupError) as refused:
        ModelConfig.from_dir(tmp_path)
    assert "config.json" in str(refused.value)
    assert len(str(refused.value)) < 300


def test_layouts_with_length_dependent_rotations_differ_by_the_maximum_length() -> None:
    config = ModelConfig.from_hf(LLAMA | {"rope_scaling": LONGROPE})
    short, long = (
        config.kv_layout(fingerprint="f", dtype="auto", block_size=16, max_model_len=length) for length in (128, 512)
    )
    with pytest.raises(LayoutMismatch, match="model"):
        short.require_equal(long)
    plain = ModelConfig.from_hf(LLAMA)
    plain.kv_layout(fingerprint="f", dtype="auto", block_size=16, max_model_len=128).require_equal(
        plain.kv_layout(fingerprint="f", dtype="float32", block_size=16)
    )


def test_a_number_of_layers_far_above_real_ones_is_refused_before_it_takes_memory() -> None:
    with pytest.raises(SetupError, match="num_hidden_layers is 2147483647, but must be at most 10000"):
        ModelConfig.from_hf(LLAMA | {"num_hidden_layers": 2**31 - 1})


@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json"])
def test_the_tokenizers_own_eos_token_ends_a_text(tmp_path: Path, where: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    settings: dict[str, object] = {"eos_token": {"content": "<|im_end|>"}}
    if where == "tokenizer_config.json":
        settings["added_tokens_decoder"] = {"7": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text('{"added_tokens": [{"id": 7, "content": "<|im_end|>"}]}')
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (2, 7)


@pytest.mark.parametrize("entry", [{}, {"id": None}, {"id": []}])
def test_an_eos_token_without_an_id_ends_no_text(tmp_path: Path, entry: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}')
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": "<|end|>", **entry}]}))
    assert ModelConfig.from_dir(tmp_path).eos_token_ids == (2,)


def test_an_end_of_text_beyond_the_vocabulary_is_dropped_because_no_worker_can_generate_it() -> None:
    assert ModelConfig.from_hf(LLAMA | {"eos_token_id": [2, 97, 2**31 - 1]}).eos_token_ids == (2,)


def test_an_error_about_a_hostile_file_is_one_printable_line_of_limited_length() -> None:
    with pytest.raises(SetupError) as refused:
        ModelConfig.from_hf(LLAMA | {"model_type": "\x1b[2J\n" + "x" * 10**6})
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) <= 4000
