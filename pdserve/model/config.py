"""The config of a model, read from its Hugging Face `config.json`. Decides which models are supported. No torch.

transformers ignores config fields that its class for a `model_type` does not know, so ignoring them too gives the same
model. Fields that those classes do read are either used here or refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.model.end_of_text import end_of_text_ids, listed_ids
from pdserve.model.fields import Fields
from pdserve.model.known_fields import CONFIG
from pdserve.model.rope_config import RopeConfig, rope_from_hf

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
#: Far above the number of layers of a real model; each layer is some objects, even before its weights are read.
MAX_LAYERS = 10_000
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One decoder of the llama family."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    #: Attention window of each layer: position p attends to (p - window, p]; None: to the whole context.
    layer_windows: tuple[int | None, ...]
    #: Token ids that end a completion, including those of the generation config and of the tokenizer.
    eos_token_ids: tuple[int, ...]
    #: Dtype of the stored weights, and of computation with "auto".
    dtype: str

    @classmethod
    def from_dir(cls, model_dir: Path) -> ModelConfig:
        """Read `config.json`, and of other files what they say of the end of texts. Raises `SetupError`."""
        config = Fields.read(model_dir / "config.json")
        return _from_fields(config, end_of_text_ids(model_dir, config))

    @classmethod
    def from_hf(cls, config: Mapping[str, object], generation: Mapping[str, object] | None = None) -> ModelConfig:
        """Read a parsed config. Raises `SetupError` that names an unsupported architecture or field."""
        fields = Fields(config, "config.json")
        return _from_fields(fields, listed_ids(fields, Fields(generation or {}, "generation_config.json")))

    @property
    def max_context(self) -> int:
        """Tokens of the longest sequence, as a scaling that the config declares has extended it.

        Many configs still have the length before in `max_position_embeddings`.
        """
        if self.rope.rope_type == "yarn":
            extended = int(self.rope.original_max_position_embeddings * self.rope.factor)
        elif self.rope.rope_type in ("linear", "dynamic"):
            extended = int(self.max_position_embeddings * self.rope.factor)
        else:
            extended = 0
        return max(self.max_position_embeddings, extended)

    @property
    def default_context(self) -> int:
        """Tokens of the longest sequence unless the operator sets them.

        Only yarn says from which length it extends. Configs with linear scaling often have the extended length already,
        and dynamic scaling rotates short sequences otherwise where long ones are served.
        """
        return self.max_context if self.rope.rope_type == "yarn" else self.max_position_embeddings

    def kv_layout(self, *, fingerprint: str, dtype: str, block_size: int, max_model_len: int | None = None) -> KvLayout:
        """The layout of KV blocks; `dtype` "auto" is the model's own.

        With dynamic or longrope scaling, rotations depend on the maximum length served. That length then becomes part
        of the model's name, because blocks of different lengths must not be mixed.
        """
        if self.rope.rope_type in ("dynamic", "longrope"):
            fingerprint = f"{fingerprint}/{max_model_len or self.max_position_embeddings}"
        return KvLayout.uniform(
            model=fingerprint,
            dtype=self.dtype if dtype == "auto" else dtype,
            block_size=block_size,
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )


def _from_fields(config: Fields, ends: tuple[int, ...]) -> ModelConfig:
    model_type = _model_type(config)
    _refuse_unsupported(config)
    hidden_size = config.integer("hidden_size")
    num_layers = _num_layers(config)
    num_heads = config.integer("num_attention_heads")
    # If absent, attention is multi-head, except in mistral, whose class has a default of its own.
    num_kv_heads = config.integer("num_key_value_heads", 8 if model_type == "mistral" else num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    head_dim = config.integer("head_dim", 128 if model_type == "qwen3" else hidden_size // num_heads or None)
    if head_dim % 2:
        raise config.wrong("head_dim", "even, because positions are encoded by rotating pairs")
    max_positions = config.integer("max_position_embeddings")
    attention_bias = config.flag("attention_bias", False)
    vocab_size = config.integer("vocab_size")
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=rope_from_hf(config, head_dim=head_dim, max_position_embeddings=max_positions),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        # mistral has no such flag. qwen2 always has biases of q, k and v, and never one of the output.
        qkv_bias=model_type == "qwen2" or (attention_bias and model_type != "mistral"),
        output_bias=attention_bias and model_type in ("llama", "qwen3"),
        mlp_bias=config.flag("mlp_bias", False) and model_type == "llama",
        qk_norm=model_type == "qwen3",
        layer_windows=_layer_windows(config, model_type, num_layers),
        # An id beyond the vocabulary is never generated.
        eos_token_ids=tuple(index for index in ends if index < vocab_size),
        dtype=_dtype(config),
    )


def _num_layers(config: Fields) -> int:
    num_layers = config.integer("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise config.wrong("num_hidden_layers", f"at most {MAX_LAYERS}")
    return num_layers


def _model_type(config: Fields) -> str:
    supported = f"supported: {', '.join(f'{kind} ({name})' for kind, name in ARCHITECTURES.items())}"
    model_type = config.text("model_type", "")
    architectures = config.texts("architectures")
    if model_type not in ARCHITECTURES:
        name = model_type or "/".join(architectures) or "missing"
        raise SetupError(f"{config.where}: model_type {name} is not supported; {supported}.")
    # A checkpoint saved from a bare config names no architecture; then the model_type decides.
    if architectures and ARCHITECTURES[model_type] not in architectures:
        raise SetupError(f"{config.where}: architecture {'/'.join(architectures)} is not supported; {supported}.")
    return model_type


def _refuse_unsupported(config: Fields) -> None:
    CONFIG.check(config)
    if config.has("quantization_config") and not _is_kv_only(config.object("quantization_config")):
        raise SetupError(f"{config.where}: quantization_config is not supported. Use a checkpoint without it.")
    activation = config.text("hidden_act", "silu")
    if activation != "silu":
        raise SetupError(f"{config.where}: hidden_act {activation!r} is not supported; supported: silu.")
    if config.flag("is_encoder_decoder", False):
        raise SetupError(f"{config.where}: is_encoder_decoder is not supported; supported: decoders.")


def _is_kv_only(quantization: Fields) -> bool:
    """Whether nothing is quantized, and the checkpoint just has scales for an fp8 KV cache."""
    scheme = quantization.object("kv_cache_scheme")
    is_fp8 = scheme.raw("num_bits") == 8 and scheme.raw("type") == "float"
    is_plain = not scheme.raw("dynamic") and scheme.raw("symmetric") is not False
    others = ("config_groups", "sparsity_config", "transform_config")
    method = quantization.raw("quant_method")
    return method == "compressed-tensors" and is_fp8 and is_plain and not any(map(quantization.raw, others))


def _layer_windows(config: Fields, model_type: str, num_layers: int) -> tuple[int | None, ...]:
    layer_types = config.texts("layer_types")
    if layer_types and len(layer_types) != num_layers:
        raise config.wrong("layer_types", f"a list of {num_layers} names, one per layer")
    unknown = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if unknown:
        supported = "supported: full_attention, sliding_attention"
        raise SetupError(f"{config.where}: layer_types {', '.join(unknown)} is not supported; {supported}.")
    if model_type == "llama":
        return _uniform(config, layer_types, None, num_layers)
    if model_type == "mistral":
        # An explicit null means no window. Only an absent field has the default of transformers' class.
        absent = "sliding_window" not in config.names()
        window = 4096 if absent else config.integer("sliding_window") if config.has("sliding_window") else None
        return _uniform(config, layer_types, window, num_layers)
    on = config.flag("use_sliding_window", False) and (
        config.has("sliding_window") or "sliding_window" not in config.names()
    )
    window = config.integer("sliding_window", 4096) if on else None
    first = config.integer("max_window_layers", 28) if config.raw("max_window_layers") != 0 else 0
    if not layer_types:
        return tuple(window if index >= first else None for index in range(num_layers))
    if window is None and "sliding_attention" in layer_types:
        raise SetupError(f"{config.where}: layer_types has sliding_attention, but use_sliding_window is false.")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _uniform(
    config: Fields, layer_types: tuple[str, ...], window: int | None, num_layers: int
) -> tuple[int | None, ...]:
    """The same window for all layers of these model types, which `layer_types` must not contradict."""
    expected = "full_attention" if window is None else "sliding_attention"
    if set(layer_types) - {expected}:
        raise SetupError(
            f"{config.where}: layer_types {', '.join(sorted(set(layer_types)))} is not supported for this model_type; "
            f"supported: {expected}."
        )
    return (window,) * num_layers


def _dtype(config: Fields) -> str:
    name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
    if name not in DTYPES:
        raise SetupError(f"{config.where}: dtype {name} is not supported; supported: {', '.join(DTYPES)}.")
    return name
