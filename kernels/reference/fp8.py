"""Conversion to and from the numbers of an fp8 KV cache, as bytes: torch has no scatter and no fill of 8-bit floats."""

from __future__ import annotations

import torch
from torch import Tensor

#: Three bits follow the leading one; below 2^-6 the step is 2^-9.
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def to_fp8(values: Tensor, scales: Tensor) -> Tensor:
    """values / scales, rounded once to nearest even and saturated to +-448; NaN stays NaN.

    Both are float32; `scales` broadcast against `values`. Returns uint8 of values' shape.
    """
    return (values / scales).clamp_(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)


def from_fp8(stored: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """stored * scales, computed in float32 and rounded once. `stored`: uint8 from `to_fp8`; `scales` broadcast."""
    return stored.view(FP8).float().mul_(scales).to(dtype)
