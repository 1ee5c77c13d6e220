"""A linear layer whose bits do not depend on the batch: each sum has one order, for any number of rows.

Nothing is split along the depth, and rows of a tile do not interact. So a row has the same bits at any index of any
batch, as long as the tile depends on the matrix alone. Tall tiles are faster for many rows; they are for GPUs that have
shown the same bits with them (`kernels.triton.tile_check`).

Source: the idea of batch invariance in "Defeating Nondeterminism in LLM Inference" (Thinking Machines, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.activation import gated

#: The interpreter multiplies bfloat16 as if its bits were integers. Products of float32 are exact as well.
_WIDEN = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTile:
    """How one launch is divided into programs."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    #: Row tiles whose programs run at the same time, so that they find the matrix in the L2 cache.
    group_m: int = 16


#: Tiles for many rows, the fastest first. Two groups of four warps take 64 rows each, as one does in smaller tiles.
TALL_TILES = (
    GemmTile(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=3),
    GemmTile(block_m=128, block_n=128, block_k=64, num_warps=8, num_stages=4),
)
#: Fewer programs leave too many of the 132 multiprocessors of an H200 without work.
_MIN_PROGRAMS = 120


def choose_tile(out_features: int, dtype: torch.dtype) -> GemmTile:
    """The tile for a matrix, whatever the number of rows.

    A product of few rows is bound by reading the matrix from memory: it needs many programs along the matrix' rows, and
    many bytes in flight in each. One wgmma instruction takes 64 rows; more would only be padding there.
    """
    if dtype == torch.float32:
        return GemmTile(block_m=64, block_n=64, block_k=32, num_warps=4, num_stages=3)
    if out_features >= 128 * 128:
        return GemmTile(block_m=64, block_n=128, block_k=64, num_warps=4, num_stages=4)
    if out_features >= 2048:
        # Fewer programs than the 132 multiprocessors of an H200: deeper pipelines make up for it.
        return GemmTile(block_m=64, block_n=64, block_k=64, num_warps=4, num_stages=6)
    return GemmTile(block_m=64, block_n=32, block_k=128, num_warps=4, num_stages=5)


def choose_tile_for_rows(num_rows: int, out_features: int, dtype: torch.dtype) -> GemmTile:
    """The fastest tile for a number of rows, where bits do not depend on it.

    A product of many rows is bound by its multiplications: the larger a tile, the fewer bytes it reads for each.
    """
    flat = choose_tile(out_features, dtype)
    if dtype == torch.float32 or num_rows <= flat.block_m:
        return flat
    for tile in TALL_TILES:
        if triton.cdiv(num_rows, tile.block_m) * triton.cdiv(out_features, tile.block_n) >= _MIN_PROGRAMS:
            return tile
    return flat


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    tile: GemmTile | None = None,
) -> Tensor:
    """x @ weight.T + bias, summed in float32 and rounded once, to `out_dtype` (None: x's).

    x: [num_rows, depth], rows at any stride; weight: [out_features, depth]; bias: [out_features]. `tile` replaces that
    of `choose_tile`; whether it gives the same bits depends on the GPU.
    """
    return _launch(x, weight, bias, out_dtype or x.dtype, tile, is_gated=False)


def gated_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tile: GemmTile | None = None) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) in one launch, rounded where `linear` and `silu_mul` round: [num_rows, width].

    weight: [2 * width, depth], the rows of gate and then those of up; bias: [2 * width]. A program computes the same
    columns of both, half a tile of each. Whether it gives the bits of the two launches depends on the GPU.
    """
    return _launch(x, weight, bias, x.dtype, tile, is_gated=True)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, tile: GemmTile | None, *, is_gated: bool
) -> Tensor:
    _check(x, weight, bias)
    num_rows, depth = x.shape
    tile = tile or choose_tile(len(weight), x.dtype)
    assert len(weight) % 2 == 0 or not is_gated
    out_features, block_n = (len(weight) // 2, tile.block_n // 2) if is_gated else (len(weight), tile.block_n)
    out = torch.empty((num_rows, out_features), dtype=out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(num_rows, tile.block_m) * triton.cdiv(out_features, block_n),)
    _linear_kernel[grid](
        x,
        weight,
        bias,
        out,
        num_rows,
        out_features,
        depth,
        x.stride(0),
        weight.stride(0),
        even_k=depth % tile.block_k == 0,
        widen=_WIDEN and x.dtype != torch.float32,
        is_gated=is_gated,
        block_m=tile.block_m,
        block_n=block_n,
        block_k=tile.block_k,
        group_m=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    out_features = weight.shape[0]
    assert weight.shape == (out_features, x.shape[1])
    assert x.dtype == weight.dtype
    assert x.stride(1) == weight.stride(1) == 1
    assert bias is None or (bias.shape == (out_features,) and bias.is_contiguous())


# Specialized on numbers of rows, it would have several variants, whose bits would have to be proved equal.
@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    out_features,
    depth,
    x_row_stride,
    weight_row_stride,
    even_k: tl.constexpr,
    widen: tl.constexpr,
    is_gated: tl.constexpr,
    block_m: tl.constexpr,
    block_n: tl.constexpr,
    block_k: tl.constexpr,
    group_m: tl.constexpr,
):
    """`is_gated`: rows from `out_features` on are those of up, whose products are the factors of the others."""
    program = tl.program_id(0)
    tiles_n = tl.cdiv(out_features, block_n)
    first_m = program // (group_m * tiles_n) * group_m
    group = tl.minimum(tl.cdiv(num_rows, block_m) - first_m, group_m)
    within = program % (group_m * tiles_n)
    rows = (first_m + within % group) * block_m + tl.arange(0, block_m)
    columns = within // group * block_n + tl.arange(0, block_n)
    ks = tl.arange(0, block_k)
    row_inside = rows < num_rows
    column_inside = columns < out_features
    x_tile = x + rows.to(tl.int64)[:, None] * x_row_stride + ks[None, :]
    weight_tile = weight + columns.to(tl.int64)[None, :] * weight_row_stride + ks[:, None]
    sums = tl.zeros((block_m, block_n), dtype=tl.float32)
    if is_gated:
        up_sums = tl.zeros((block_m, block_n), dtype=tl.float32)
        to_up = tl.cast(out_features, tl.int64) * weight_row_stride
    for k in range(0, depth, block_k):
        x_mask = row_inside[:, None]
        weight_mask = column_inside[None, :]
        if not even_k:
            x_mask = x_mask & (ks[None, :] < depth - k)
            weight_mask = weight_mask & (ks[:, None] < depth - k)
        left = tl.load(x_tile, mask=x_mask, other=0.0)
        if widen:
            left = left.to(tl.float32)
        sums = _add_product(sums, left, weight_tile, weight_mask, widen)
        if is_gated:
            up_sums = _add_product(up_sums, left, weight_tile + to_up, weight_mask, widen)
        x_tile += block_k
        weight_tile += block_k
    result = _biased(sums, bias, columns, column_inside).to(out.dtype.element_ty)
    if is_gated:
        up_bias = None if bias is None else bias + out_features
        up = _biased(up_sums, up_bias, columns, column_inside).to(out.dtype.element_ty)
        result = gated(result, up, False)
    out_tile = out + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    tl.store(out_tile, result, mask=row_inside[:, None] & column_inside[None, :])


@triton.jit
def _add_product(sums, left, weight_tile, mask, widen: tl.constexpr):
    right = tl.load(weight_tile, mask=mask, other=0.0)
    if widen:
        right = right.to(tl.float32)
    return tl.dot(left, right, sums, input_precision="ieee")


@triton.jit
def _biased(sums, bias, columns, column_inside):
    if bias is not None:
        sums += tl.load(bias + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    return sums
