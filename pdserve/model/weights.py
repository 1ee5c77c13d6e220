"""The tensors of a decoder in the shape it uses them, built from a checkpoint's."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kernels.decoder import DecoderWeights, LayerWeights
from pdserve.model.config import ModelConfig


def assemble(config: ModelConfig, get: Callable[[str], Tensor]) -> DecoderWeights:
    """Builds the weights from checked tensors; `get` is called once per tensor."""
    embedding = get("model.embed_tokens.weight")
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_assemble_layer(config, f"model.layers.{index}.", get) for index in range(config.num_layers)),
        norm=get("model.norm.weight"),
        lm_head=embedding if config.tie_word_embeddings else get("lm_head.weight"),
    )


def _assemble_layer(config: ModelConfig, prefix: str, get: Callable[[str], Tensor]) -> LayerWeights:
    def when(present: bool, name: str) -> Tensor | None:
        return get(prefix + name) if present else None

    return LayerWeights(
        input_norm=get(prefix + "input_layernorm.weight"),
        q=get(prefix + "self_attn.q_proj.weight"),
        k=get(prefix + "self_attn.k_proj.weight"),
        v=get(prefix + "self_attn.v_proj.weight"),
        q_bias=when(config.qkv_bias, "self_attn.q_proj.bias"),
        k_bias=when(config.qkv_bias, "self_attn.k_proj.bias"),
        v_bias=when(config.qkv_bias, "self_attn.v_proj.bias"),
        q_norm=when(config.qk_norm, "self_attn.q_norm.weight"),
        k_norm=when(config.qk_norm, "self_attn.k_norm.weight"),
        output=get(prefix + "self_attn.o_proj.weight"),
        output_bias=when(config.output_bias, "self_attn.o_proj.bias"),
        post_attention_norm=get(prefix + "post_attention_layernorm.weight"),
        gate=get(prefix + "mlp.gate_proj.weight"),
        gate_bias=when(config.mlp_bias, "mlp.gate_proj.bias"),
        up=get(prefix + "mlp.up_proj.weight"),
        up_bias=when(config.mlp_bias, "mlp.up_proj.bias"),
        down=get(prefix + "mlp.down_proj.weight"),
        down_bias=when(config.mlp_bias, "mlp.down_proj.bias"),
    )
