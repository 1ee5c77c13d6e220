"""The table of cosines and sines with which every layer rotates q and k.

In transformers, dynamic and longrope scaling depend on the current length. Here they depend on the maximum length
served: rotated K is cached and shared, so a token's rotation must not change while its sequence grows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.model.rope_config import RopeConfig


def make_cos_sin(rope: RopeConfig, *, head_dim: int, max_position_embeddings: int, max_model_len: int) -> Tensor:
    """Float32 [max_model_len, 2, head_dim]: cosines, then sines. Each frequency occurs in both halves of head_dim."""
    inverse, scaling = _frequencies(rope, head_dim, max_position_embeddings, max_model_len)
    angles = torch.arange(max_model_len, dtype=torch.float32).unsqueeze(-1) * inverse
    halves = torch.stack((angles.cos(), angles.sin()), dim=1).mul_(scaling)
    return torch.cat((halves, halves), dim=-1)


def _frequencies(
    rope: RopeConfig, head_dim: int, max_position_embeddings: int, max_model_len: int
) -> tuple[Tensor, float]:
    """Radians per position, [head_dim / 2], and the factor of cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    match rope.rope_type:
        case "linear":
            return 1.0 / (rope.theta**exponents) / rope.factor, 1.0
        case "dynamic":
            length = max(max_model_len, max_position_embeddings)
            stretch = rope.factor * length / max_position_embeddings - (rope.factor - 1)
            return 1.0 / ((rope.theta * stretch ** (head_dim / (head_dim - 2))) ** exponents), 1.0
        case "llama3":
            return _llama3(rope, 1.0 / (rope.theta**exponents)), 1.0
        case "yarn":
            return _yarn(rope, head_dim, rope.theta**exponents), _yarn_scaling(rope)
        case "longrope":
            long = max_model_len > rope.original_max_position_embeddings
            divisors = torch.tensor(rope.long_factor if long else rope.short_factor, dtype=torch.float32)
            return 1.0 / (divisors * rope.theta**exponents), _longrope_scaling(rope)
        case _:
            return 1.0 / (rope.theta**exponents), 1.0


def _llama3(rope: RopeConfig, inverse: Tensor) -> Tensor:
    """Long wavelengths are multiplied by the factor, short ones kept, and those in between interpolated."""
    wavelengths = 2 * math.pi / inverse
    original = rope.original_max_position_embeddings
    long, short = original / rope.low_freq_factor, original / rope.high_freq_factor
    blend = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * inverse / rope.factor + blend * inverse
    stretched = torch.where(wavelengths > long, inverse / rope.factor, inverse)
    return torch.where((wavelengths >= short) & (wavelengths <= long), blended, stretched)


def _yarn(rope: RopeConfig, head_dim: int, periods: Tensor) -> Tensor:
    """High frequencies are kept, low frequencies divided by the factor, with a linear ramp in between."""

    def dimension(rotations: float) -> float:
        log_ratio = math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
        return head_dim * log_ratio / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_scaling(rope: RopeConfig) -> float:
    def scaling(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale is not None and rope.mscale_all_dim is not None:
        return scaling(rope.mscale) / scaling(rope.mscale_all_dim)
    return scaling(1.0)


def _longrope_scaling(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_position_embeddings))
