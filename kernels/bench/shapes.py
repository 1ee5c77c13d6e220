"""Shapes of the measured models."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.decoder import DecoderShape, DecoderWeights, LayerWeights

_CPU = torch.device("cpu")

LLAMA_8B = DecoderShape(
    hidden_size=4096,
    intermediate_size=14_336,
    vocab_size=128_256,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    windows=(None,) * 32,
)
#: Shapes that `kernels.bench` measures. Large models have a few layers, which take about 2 GB with packed copies.
SHAPES = {
    "smollm2-135m": DecoderShape(
        hidden_size=576,
        intermediate_size=1536,
        vocab_size=49_152,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        rms_norm_eps=1e-5,
        windows=(None,) * 30,
    ),
    # A part of the vocabulary is enough to measure the head.
    "llama-3.1-8b": replace(LLAMA_8B, vocab_size=8192, windows=(None, None)),
}


def random_weights(shape: DecoderShape, dtype: torch.dtype, device: torch.device = _CPU) -> DecoderWeights:
    """Random weights that preserve the size of activations, roughly."""

    def matrix(features: int, depth: int) -> Tensor:
        return torch.randn(features, depth, device=device).mul_(float(depth**-0.5)).to(dtype)

    def layer() -> LayerWeights:
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        ones = torch.ones(shape.hidden_size, dtype=dtype, device=device)
        return LayerWeights(
            input_norm=ones,
            q=matrix(width, shape.hidden_size),
            k=matrix(kv_width, shape.hidden_size),
            v=matrix(kv_width, shape.hidden_size),
            q_bias=None,
            k_bias=None,
            v_bias=None,
            q_norm=None,
            k_norm=None,
            output=matrix(shape.hidden_size, width),
            output_bias=None,
            post_attention_norm=ones,
            gate=matrix(shape.intermediate_size, shape.hidden_size),
            gate_bias=None,
            up=matrix(shape.intermediate_size, shape.hidden_size),
            up_bias=None,
            down=matrix(shape.hidden_size, shape.intermediate_size),
            down_bias=None,
        )

    embedding = matrix(shape.vocab_size, shape.hidden_size)
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layer() for _ in shape.windows),
        norm=torch.ones(shape.hidden_size, dtype=dtype, device=device),
        lm_head=embedding,
    )
