"""Random small models of the four architectures with awkward shapes, as Hypothesis strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from kernels.choice import KernelOptions
from kernels.decoder import DecoderWeights, LayerWeights, Ranks
from pdserve.model.config import ARCHITECTURES, ModelConfig
from pdserve.model.decoder import Decoder
from pdserve.model.sharding import rank_config, tensor_shards
from pdserve.model.tensors import tensor_shapes
from pdserve.model.weights import assemble
from tests.support.backends import REFERENCE

MAX_POSITIONS = 1024
#: Multiples of a vector or a tile, and sizes that are neither.
_WIDTHS = (24, 33, 64, 130, 320, 576)
_VOCABULARIES = (97, 512, 1031)
_WINDOWS = (None, 1, 7, 16, 21, 100)

Fields = dict[str, object]


@st.composite
def model_configs(draw: st.DrawFn) -> Fields:
    """A `config.json` with any architecture, GQA group size, head size and kind of window that the decoder supports."""
    model_type = draw(st.sampled_from(sorted(ARCHITECTURES)))
    group_size, num_kv_heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    window = draw(st.sampled_from(_WINDOWS)) if model_type != "llama" else None
    fields: Fields = {
        "model_type": model_type,
        "vocab_size": draw(st.sampled_from(_VOCABULARIES)),
        "hidden_size": draw(st.sampled_from(_WIDTHS)),
        "intermediate_size": draw(st.sampled_from(_WIDTHS)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": group_size * num_kv_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": draw(st.sampled_from([16, 32, 64, 128, 20, 80])),
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": 10000.0,
        "tie_word_embeddings": draw(st.booleans()),
        "sliding_window": window,
    }
    if model_type == "llama":
        fields |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    if model_type in ("qwen2", "qwen3"):
        fields |= {"use_sliding_window": window is not None, "max_window_layers": draw(st.integers(0, 1))}
    return fields


def make_decoder(
    fields: Fields, options: KernelOptions, dtype: torch.dtype, *, seed: int = 0, device: torch.device | None = None
) -> Decoder:
    """A decoder with random weights that depend on config and seed alone."""
    config = ModelConfig.from_hf(fields)
    weights = _random_weights(config, dtype, seed)
    return Decoder(config, _each(weights, lambda tensor: tensor.to(device)) if device else weights, kernels=options)


def make_rank_decoder(
    fields: Fields, options: KernelOptions, dtype: torch.dtype, ranks: Ranks, *, seed: int = 0
) -> Decoder:
    """A rank's shard of the decoder that `make_decoder` makes."""
    config = ModelConfig.from_hf(fields)
    tensors, shards = _random_tensors(config, dtype, seed), tensor_shards(config, ranks.rank, ranks.size)
    weights = assemble(config, lambda name: tensors[name][shards[name]], rank=ranks.rank, size=ranks.size)
    return Decoder(rank_config(config, ranks.size), weights, kernels=options, ranks=ranks)


def make_truth(fields: Fields, dtype: torch.dtype, quantization: str | None, *, seed: int = 0) -> Decoder:
    """The reference of accuracy: the weights as such a decoder stores them, computed by plain torch in float32."""
    config = ModelConfig.from_hf(fields)
    weights = _random_weights(config, dtype, seed)
    stored = _each(weights, lambda tensor: _rounded_to_int8(tensor) if quantization and tensor.dim() == 2 else tensor)
    # The embedding is only looked up, so it is not quantized.
    stored = replace(stored, embedding=weights.embedding)
    return Decoder(config, _each(stored, Tensor.float), kernels=REFERENCE)


def _random_weights(config: ModelConfig, dtype: torch.dtype, seed: int) -> DecoderWeights:
    return assemble(config, _random_tensors(config, dtype, seed).__getitem__)


def _random_tensors(config: ModelConfig, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Random values; matrices are scaled to preserve the magnitude of activations."""
    generator = torch.Generator().manual_seed(seed)

    def random(name: str, shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, generator=generator)
        if "norm" in name:
            return 1 + values * 0.2
        return values * 0.2 if "bias" in name else values if "embed" in name else values * shape[1] ** -0.5

    return {name: random(name, shape).to(dtype) for name, shape in tensor_shapes(config).items()}


def _rounded_to_int8(matrix: Tensor) -> Tensor:
    """Rounds each row of [out_features, in_features] to multiples of 1/127 of its largest value."""
    steps = matrix.float().abs().amax(dim=1, keepdim=True) / 127
    return (matrix.float() / steps).round() * steps


def _each(weights: DecoderWeights, change: Callable[[Tensor], Tensor]) -> DecoderWeights:
    def in_layer(layer: LayerWeights) -> LayerWeights:
        tensors: dict[str, Any] = {field.name: getattr(layer, field.name) for field in fields_of(layer)}
        return replace(layer, **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None})

    return DecoderWeights(
        embedding=change(weights.embedding),
        layers=tuple(map(in_layer, weights.layers)),
        norm=change(weights.norm),
        lm_head=change(weights.lm_head),
    )
