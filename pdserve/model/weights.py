"""The tensors of a decoder in the shape it uses them, built from a checkpoint's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.decoder import DecoderWeights, LayerWeights
from kernels.split import even_slice
from pdserve.model.config import ModelConfig


def assemble(
    config: ModelConfig, get: Callable[[str], Tensor], *, side_by_side: bool = False, rank: int = 0, size: int = 1
) -> DecoderWeights:
    """Builds the weights from checked tensors; `get` is called once per tensor that the rank takes part of.

    `get` gives that part (`pdserve.model.sharding.tensor_shards`). Of a tied embedding `lm_head` is a view.
    With `side_by_side` q, k and v, and gate and up, become views of one matrix each: a copy of one layer at a time.
    """
    join = _adjacent if side_by_side else lambda *parts: parts
    embedding = get("model.embed_tokens.weight")
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(
            _assemble_layer(config, f"model.layers.{index}.", get, join, adds_bias=rank == 0)
            for index in range(config.num_layers)
        ),
        norm=get("model.norm.weight"),
        lm_head=_tied(embedding, rank, size) if config.tie_word_embeddings else get("lm_head.weight"),
    )


def _adjacent(*parts: Tensor) -> Sequence[Tensor]:
    return torch.split(torch.cat(parts), [len(part) for part in parts])


def _tied(embedding: Tensor, rank: int, size: int) -> Tensor:
    return embedding if size == 1 else embedding[even_slice(len(embedding), rank, size)]


def _assemble_layer(
    config: ModelConfig,
    prefix: str,
    get: Callable[[str], Tensor],
    join: Callable[..., Sequence[Tensor]],
    *,
    adds_bias: bool,
) -> LayerWeights:
    """`adds_bias`: to the sums that all ranks have parts of."""

    def when(present: bool, name: str) -> Tensor | None:
        return get(prefix + name) if present else None

    q, k, v = join(*(get(f"{prefix}self_attn.{name}_proj.weight") for name in "qkv"))
    gate, up = join(*(get(f"{prefix}mlp.{name}_proj.weight") for name in ("gate", "up")))
    return LayerWeights(
        input_norm=get(prefix + "input_layernorm.weight"),
        q=q,
        k=k,
        v=v,
        q_bias=when(config.qkv_bias, "self_attn.q_proj.bias"),
        k_bias=when(config.qkv_bias, "self_attn.k_proj.bias"),
        v_bias=when(config.qkv_bias, "self_attn.v_proj.bias"),
        q_norm=when(config.qk_norm, "self_attn.q_norm.weight"),
        k_norm=when(config.qk_norm, "self_attn.k_norm.weight"),
        output=get(prefix + "self_attn.o_proj.weight"),
        output_bias=when(config.output_bias and adds_bias, "self_attn.o_proj.bias"),
        post_attention_norm=get(prefix + "post_attention_layernorm.weight"),
        gate=gate,
        gate_bias=when(config.mlp_bias, "mlp.gate_proj.bias"),
        up=up,
        up_bias=when(config.mlp_bias, "mlp.up_proj.bias"),
        down=get(prefix + "mlp.down_proj.weight"),
        down_bias=when(config.mlp_bias and adds_bias, "mlp.down_proj.bias"),
    )
