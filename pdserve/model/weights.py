"""The weights of a decoder, assembled from the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kernels.decoder import DecoderWeights, LayerWeights
from kernels.split import even_slice
from pdserve.model.config import ModelConfig


def assemble(config: ModelConfig, get: Callable[[str], Tensor], *, rank: int = 0, size: int = 1) -> DecoderWeights:
    """Assembles the weights of a rank; `get` is called once for each tensor of which the rank has a shard.

    `get` returns that shard (`pdserve.model.sharding.tensor_shards`). `lm_head` is a view of a tied embedding.
    """
    embedding = get("model.embed_tokens.weight")
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(
            _assemble_layer(config, f"model.layers.{index}.", get, adds_bias=rank == 0)
            for index in range(config.num_layers)
        ),
        norm=get("model.norm.weight"),
        lm_head=_tied(embedding, rank, size) if config.tie_word_embeddings else get("lm_head.weight"),
    )


def _tied(embedding: Tensor, rank: int, size: int) -> Tensor:
    return embedding if size == 1 else embedding[even_slice(len(embedding), rank, size)]


def _assemble_layer(
    config: ModelConfig,
    prefix: str,
    get: Callable[[str], Tensor],
    *,
    adds_bias: bool,
) -> LayerWeights:
    """`adds_bias`: whether the rank adds the biases of output and down, of which all ranks compute partial sums."""

    def get_if(exists: bool, name: str) -> Tensor | None:
        return get(prefix + name) if exists else None

    return LayerWeights(
        input_norm=get(prefix + "input_layernorm.weight"),
        q=get(prefix + "self_attn.q_proj.weight"),
        k=get(prefix + "self_attn.k_proj.weight"),
        v=get(prefix + "self_attn.v_proj.weight"),
        q_bias=get_if(config.qkv_bias, "self_attn.q_proj.bias"),
        k_bias=get_if(config.qkv_bias, "self_attn.k_proj.bias"),
        v_bias=get_if(config.qkv_bias, "self_attn.v_proj.bias"),
        q_norm=get_if(config.qk_norm, "self_attn.q_norm.weight"),
        k_norm=get_if(config.qk_norm, "self_attn.k_norm.weight"),
        output=get(prefix + "self_attn.o_proj.weight"),
        output_bias=get_if(config.output_bias and adds_bias, "self_attn.o_proj.bias"),
        post_attention_norm=get(prefix + "post_attention_layernorm.weight"),
        gate=get(prefix + "mlp.gate_proj.weight"),
        gate_bias=get_if(config.mlp_bias, "mlp.gate_proj.bias"),
        up=get(prefix + "mlp.up_proj.weight"),
        up_bias=get_if(config.mlp_bias, "mlp.up_proj.bias"),
        down=get(prefix + "mlp.down_proj.weight"),
        down_bias=get_if(config.mlp_bias and adds_bias, "mlp.down_proj.bias"),
    )
