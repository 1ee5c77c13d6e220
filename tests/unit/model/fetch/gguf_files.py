"""Writes tiny GGUF files with the `gguf` package, permuting q and k as llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from pdserve.model.config import ModelConfig

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, submodule = module.split(".", 3)
    return f"blk.{layer}.{_NAMES[submodule]}.{kind}"


def permuted(tensor: Tensor, heads: int) -> Tensor:
    """Interleaves the two halves of each head's rows."""
    return torch.cat(
        [head.view(2, -1, *head.shape[1:]).transpose(0, 1).reshape(head.shape) for head in tensor.chunk(heads)]
    )


def write_model(
    path: Path,
    architecture: str,
    config: ModelConfig,
    tensors: dict[str, Tensor],
    extra: dict[str, str | float | int] | None = None,
    rope_factors: list[float] | None = None,
    others: dict[str, str | float | int] | None = None,
) -> None:
    """Writes a complete file, with a byte-level vocabulary of `config.vocab_size` tokens.

    `extra` are keys below the architecture's name, `others` all others.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    named = {f"{architecture}.{key}": value for key, value in (extra or {}).items()}
    for key, value in (named | (others or {})).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key, value)
    write_vocabulary(writer, config.vocab_size)
    if rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(rope_factors, np.float32))
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if architecture == "llama" else {}
    for name, tensor in tensors.items():
        count = heads.get(name.split(".")[-2])
        writer.add_tensor(gguf_name(name), (permuted(tensor, count) if count else tensor).numpy())
    finish(writer)


def write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Adds a vocabulary of letters and an end-of-text token, and a chat template."""
    tokens = ["<|end|>", *(chr(ord("A") + index) if index < 26 else f"t{index}" for index in range(size - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL, *([gguf.TokenType.NORMAL] * (size - 1))])
    writer.add_token_merges([])
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}")


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes all sections and closes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
