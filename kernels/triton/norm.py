"""RMS norms, one program per row; the width is padded to a power of two and masked."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: A row must fit into registers.
MAX_WIDTH = 1 << 15


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Over the last dimension; computed in float32, rounded to x's dtype before the weight is applied.

    x: [num_rows, width] or [num_rows, num_heads, width], any strides but the last; weight: [width]. The result is
    contiguous.
    """
    assert x.dim() in (2, 3)
    heads = x.shape[1] if x.dim() == 3 else 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, weight, out, eps, heads)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, in_place: bool = False
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), the sum rounded to the dtype before anything else.

    x, residual: [num_rows, width], rows at any stride; weight: [width]. `in_place`: the sum replaces `residual`, so
    that it is written to lines that are already in the cache.
    """
    assert x.dim() == 2
    assert x.shape == residual.shape
    assert x.dtype == residual.dtype
    assert residual.stride(-1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = residual if in_place else torch.empty_like(out)
    _launch(x, weight, out, eps, sums=(residual, total))
    return out, total


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, eps: float, heads: int = 1, *, sums: tuple[Tensor, Tensor] | None = None
) -> None:
    """`sums`: the residual to add to x first, and the memory for the sum."""
    residual, total = sums or (None, None)
    width = x.shape[-1]
    assert 0 < width <= MAX_WIDTH
    assert x.stride(-1) == 1
    assert weight.shape == (width,)
    assert weight.is_contiguous()
    assert weight.dtype == x.dtype
    num_rows = x.shape[0] * heads
    if num_rows == 0:
        return
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        out,
        total,
        heads,
        width,
        x.stride(0),
        x.stride(1) if x.dim() == 3 else 0,
        0 if residual is None else residual.stride(0),
        0 if total is None else total.stride(0),
        eps,
        block=block,
        num_warps=min(max(block // 512, 1), 16),
        enable_fp_fusion=False,
    )


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    heads,
    width,
    x_row_stride,
    x_head_stride,
    residual_row_stride,
    total_row_stride,
    eps,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    inside = columns < width
    start = (row // heads) * x_row_stride + (row % heads) * x_head_stride
    values = tl.load(x + start + columns, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        values += tl.load(residual + row * residual_row_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        # May be the residual's memory: no other program reads this row.
        tl.store(total + row * total_row_stride + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    mean = tl.sum(values * values, axis=0) / width
    normed = (values * tl.rsqrt(mean + eps)).to(out.dtype.element_ty)
    scaled = normed.to(tl.float32) * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, scaled.to(out.dtype.element_ty), mask=inside)
