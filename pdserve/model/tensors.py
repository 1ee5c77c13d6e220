"""The tensors that a checkpoint must have by its config, and the check that it has exactly these. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig

Shape = tuple[int, ...]
#: Names of the scales of an fp8 KV cache in checkpoints of llm-compressor, in vLLM, and in checkpoints of ModelOpt.
_KV_SCALES = (
    ("self_attn.k_scale", "self_attn.attn.k_scale", "self_attn.k_proj.k_scale"),
    ("self_attn.v_scale", "self_attn.attn.v_scale", "self_attn.v_proj.v_scale"),
)
#: Tensors of some old checkpoints that are computed from the config instead.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Shapes of all tensors that the model needs, by Hugging Face name."""
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "model.norm.weight": (config.hidden_size,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    for index in range(config.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _layer_shapes(config)}
    return shapes


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    if config.qk_norm:
        yield "self_attn.q_norm.weight", (config.head_dim,)
        yield "self_attn.k_norm.weight", (config.head_dim,)
    matrices = (
        ("self_attn.q_proj", queries, hidden, config.qkv_bias),
        ("self_attn.k_proj", keys, hidden, config.qkv_bias),
        ("self_attn.v_proj", keys, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, queries, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for name, rows, columns, bias in matrices:
        yield f"{name}.weight", (rows, columns)
        if bias:
            yield f"{name}.bias", (rows,)


def kv_scale_names(layer: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Possible names of the scales of a layer's K, and of its V. A checkpoint need not have any."""
    k_names, v_names = (tuple(f"model.layers.{layer}.{name}" for name in names) for names in _KV_SCALES)
    return k_names, v_names


def check_tensors(config: ModelConfig, found: Mapping[str, Shape], where: str) -> None:
    """Raises `SetupError` that names missing tensors, unknown ones, and those whose shape contradicts the config."""
    expected = tensor_shapes(config)
    missing = sorted(expected.keys() - found.keys())
    scales = {name for layer in range(config.num_layers) for names in kv_scale_names(layer) for name in names}
    extra = sorted(name for name in found.keys() - expected.keys() - scales if not _is_ignored(config, name))
    if missing or extra:
        problems = [f"lacks {_listed(missing)}"] if missing else []
        problems += [f"has tensors that {config.model_type} does not: {_listed(extra)}"] if extra else []
        raise SetupError(f"{where} {' and '.join(problems)}. Does its config.json belong to these weights?")
    wrong = [name for name, shape in expected.items() if found[name] != shape]
    if wrong:
        name = wrong[0]
        raise SetupError(
            f"{where}: {name} has shape {list(found[name])}, but config.json requires {list(expected[name])}"
            f"{f' (and {len(wrong) - 1} more)' if len(wrong) > 1 else ''}."
        )


def _is_ignored(config: ModelConfig, name: str) -> bool:
    return name.endswith(_IGNORED_SUFFIXES) or (name == "lm_head.weight" and config.tie_word_embeddings)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
