"""Gated activations: act(gate) * up, with the activation rounded to the dtype before the product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns of a program: 16 bytes per thread and load.
_BLOCK = 1024


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. gate, up: [num_rows, width], rows at any stride; the result is contiguous."""
    return _gated(gate, up, gelu=False)


def gelu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation; arguments as for `silu_mul`."""
    return _gated(gate, up, gelu=True)


def silu_mul_merged(gate_up: Tensor) -> Tensor:
    """`silu_mul` of the two halves of each row; gate_up: [num_rows, 2 * width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu_mul(gate, up)


def gelu_mul_merged(gate_up: Tensor) -> Tensor:
    """`gelu_mul` of the two halves of each row; gate_up: [num_rows, 2 * width]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_mul(gate, up)


def _gated(gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
    assert gate.dim() == 2
    assert gate.shape == up.shape
    assert gate.dtype == up.dtype
    assert gate.stride(1) == up.stride(1) == 1
    num_rows, width = gate.shape
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    _gated_kernel[grid](
        gate, up, out, width, gate.stride(0), up.stride(0), gelu=gelu, block=_BLOCK, num_warps=4, enable_fp_fusion=False
    )
    return out


@triton.jit
def _gated_kernel(gate, up, out, width, gate_row_stride, up_row_stride, gelu: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    x = tl.load(gate + row * gate_row_stride + columns, mask=inside, other=0.0)
    factor = tl.load(up + row * up_row_stride + columns, mask=inside, other=0.0)
    tl.store(out + row * width + columns, gated(x, factor, gelu), mask=inside)


@triton.jit
def gated(gate, up, gelu: tl.constexpr):
    """act(gate) * up, of their dtype."""
    x = gate.to(tl.float32)
    # Either activation is x * sigmoid(z): (1 + tanh(u)) / 2 is sigmoid(2 * u).
    z = x
    if gelu:
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    # The exponential of a number that is not positive cannot overflow.
    small = tl.exp(-tl.abs(z))
    activated = (x * tl.where(z < 0, small, 1.0) / (1.0 + small)).to(gate.dtype)
    return (activated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)
