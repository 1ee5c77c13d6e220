"""Config and tensor names of a GGUF file, translated to those of a Hugging Face directory. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pdserve.base.errors import SetupError
from pdserve.model.fetch.gguf_file import GgufFile
from pdserve.model.fetch.gguf_keys import below, check_keys, shortest
from pdserve.model.fields import Fields

#: GGUF architecture -> model_type. GGUF stores mistral models as llama.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_HF_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
#: Far above half of a real head dimension.
_MAX_ROPE_FACTORS = 1 << 16
#: Tensor with divisors of the rotary frequencies (llama 3.1 and later); not a weight.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """The source of a Hugging Face tensor, and the number of heads whose rows must be reordered (0: none)."""

    gguf_name: str
    permuted_heads: int = 0


def source_tensors(gguf: GgufFile) -> dict[str, SourceTensor]:
    """Hugging Face name -> source. Raises `SetupError` for a tensor that no supported architecture has."""
    scope = _scope(gguf)
    heads = {"attn_q": scope.integer("attention.head_count"), "attn_k": scope.integer("attention.head_count_kv")}
    sources = {}
    for name in gguf.tensors:
        module, _, kind = name.rpartition(".")
        layer = _LAYER_NAME.fullmatch(name)
        if name == ROPE_FACTORS:
            continue
        if module in _TOP and kind == "weight":
            sources[f"{_TOP[module]}.weight"] = SourceTensor(gguf_name=name)
        elif layer and layer[2] in _LAYER:
            # In llama only, converters interleave the two halves of each head that are rotated together.
            permuted = heads.get(layer[2], 0) if scope.where == "llama" else 0
            hf_name = f"model.layers.{int(layer[1])}.{_LAYER[layer[2]]}.{layer[3]}"
            sources[hf_name] = SourceTensor(gguf_name=name, permuted_heads=permuted)
        else:
            raise SetupError(f"{gguf.path}: tensor {name} is not supported in architecture {scope.where}.")
    return sources


def hf_config(gguf: GgufFile) -> dict[str, object]:
    """The content of config.json, for weights in bfloat16. Raises `SetupError` that names an unsupported feature."""
    scope, metadata = _scope(gguf), gguf.metadata
    check_keys(gguf, scope.where)
    if metadata.has("split.count") and metadata.raw("split.count") not in (0, 1):
        raise SetupError(f"{gguf.path} is one file of a split model. Merge the files with llama-gguf-split --merge.")
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise SetupError(f"{gguf.path} has no tensor token_embd.weight, so it is not a language model.")
    model_type = ARCHITECTURES[scope.where]
    heads = scope.integer("attention.head_count")
    hidden = scope.integer("embedding_length")
    head_dim = scope.integer("attention.key_length", scope.integer("rope.dimension_count", hidden // heads or None))
    for name in ("rope.dimension_count", "attention.value_length"):
        if scope.integer(name, head_dim) != head_dim:
            raise SetupError(
                f"{gguf.path}: {name} {scope.integer(name)} is not supported; supported: that of heads, {head_dim}."
            )
    config: dict[str, object] = {
        "architectures": [_HF_CLASSES[model_type]],
        "model_type": model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": scope.integer("feed_forward_length"),
        "num_hidden_layers": scope.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": scope.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": scope.integer("context_length"),
        "rms_norm_eps": shortest(scope.number("attention.layer_norm_rms_epsilon")),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "rope_parameters": _rope(gguf, scope),
        "dtype": "bfloat16",
    }
    for key in ("bos_token_id", "eos_token_id"):
        ids = metadata.token_ids(f"tokenizer.ggml.{key}")
        config[key] = ids[0] if ids else None
    return config


def _rope(gguf: GgufFile, scope: Fields) -> dict[str, object]:
    theta = shortest(scope.number("rope.freq_base", 10_000.0))
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": theta}
    original = scope.integer("rope.scaling.original_context_length", scope.integer("context_length"))
    if ROPE_FACTORS in gguf.tensors:
        # These divisors apply to every length: longrope with the same factors for short and long contexts.
        shape = gguf.tensors[ROPE_FACTORS].shape
        if len(shape) != 1 or shape[0] > _MAX_ROPE_FACTORS:
            raise SetupError(f"{gguf.path}: {ROPE_FACTORS} has shape {list(shape)}; the file is damaged.")
        factors = [float(value) for value in gguf.array(ROPE_FACTORS).flat]
        return rope | {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": original,
        }
    factor = scope.raw("rope.scaling.factor") or scope.raw("rope.scale_linear") or 1
    # llama.cpp scales linearly where a factor comes without a type, as old files have it.
    kind = scope.text("rope.scaling.type", "none" if factor == 1 else "linear")
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise SetupError(f"{gguf.path}: rope scaling {kind!r} is not supported in GGUF; supported: none, linear, yarn.")
    rope |= {
        "rope_type": kind,
        "factor": shortest(Fields({"rope.scaling.factor": factor}, scope.where).number("rope.scaling.factor")),
    }
    return rope | ({"original_max_position_embeddings": original} if kind == "yarn" else {})


def _scope(gguf: GgufFile) -> Fields:
    """The metadata of the architecture, without its prefix; `where` is the architecture's name."""
    architecture = gguf.metadata.text("general.architecture", "")
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise SetupError(f"{gguf.path}: architecture {architecture!r} is not supported; supported: {supported}.")
    fields = below(gguf.metadata, f"{architecture}.")
    if any("expert_count" in name and fields.raw(name) != 0 for name in fields.names()):
        raise SetupError(f"{gguf.path}: mixture-of-experts models are not supported; supported: dense models.")
    return Fields({name: fields.raw(name) for name in fields.names()}, architecture)
