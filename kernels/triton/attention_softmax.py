"""The softmax over the keys of a paged context, tile by tile, as the kernels of attention share it.

Keys are walked in tiles that begin at multiples of BLOCK_N. Bits: sums across tiles are written as fused multiply-adds,
and what a row does not see (a key, a tile, a whole split) adds an exact zero to them. With the same tiles and splits a
row has the same bits in every kernel, whatever rows it shares a tile with.

Source: FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

#: The interpreter multiplies bfloat16 as if its bits were integers.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def nothing_seen(ROWS: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """The state of a softmax before its first key: greatest score, sum of weights, weighted sum of values."""
    peak = tl.full([ROWS], _NOTHING, tl.float32)
    return peak, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)


@triton.jit
def attend(
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    row_positions,
    begin,
    seen_by_all,
    end,
    lo,
    hi,
    scale,
    window,
    stride_block,
    stride_slot,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_UNMASKED: tl.constexpr,
):
    """The softmax over the keys [begin, end); tiles before `seen_by_all` need no mask if HAS_UNMASKED."""
    peak, weight, acc = nothing_seen(BLOCK_M, HEAD_DIM_PADDED)
    masked = begin
    if HAS_UNMASKED:
        masked = tl.maximum(begin, tl.minimum(end, seen_by_all))
        peak, weight, acc = _walk(
            peak,
            weight,
            acc,
            q,
            k_ptr,
            v_ptr,
            table_ptr,
            row_positions,
            begin,
            masked,
            lo,
            hi,
            scale,
            window,
            stride_block,
            stride_slot,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            BLOCK_SIZE,
            BLOCK_N,
            HAS_WINDOW,
            False,
        )
    peak, weight, acc = _walk(
        peak,
        weight,
        acc,
        q,
        k_ptr,
        v_ptr,
        table_ptr,
        row_positions,
        masked,
        end,
        lo,
        hi,
        scale,
        window,
        stride_block,
        stride_slot,
        HEAD_DIM,
        HEAD_DIM_PADDED,
        BLOCK_SIZE,
        BLOCK_N,
        HAS_WINDOW,
        True,
    )
    return peak, weight, acc


@triton.jit
def _walk(
    peak,
    weight,
    acc,
    q,
    k_ptr,
    v_ptr,
    table_ptr,
    row_positions,
    begin,
    end,
    lo,
    hi,
    scale,
    window,
    stride_block,
    stride_slot,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Takes the keys [begin, end) into the state, tile by tile. Of the cache only the keys [lo, hi) are read.

    `peak` is in units of the exponent of exp2, so that a state that meets no greater score is scaled by exactly 1.
    """
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        readable = (positions >= lo) & (positions < hi)
        if IS_MASKED:
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE, mask=readable, other=0)
        else:
            blocks = tl.load(table_ptr + positions // BLOCK_SIZE)
        places = (blocks * stride_block + (positions % BLOCK_SIZE) * stride_slot)[:, None] + dims
        # Values are masked too: nothing, not even a weight of zero, would undo a NaN of another sequence.
        k = _tile(k_ptr + places, readable, HEAD_DIM, HEAD_DIM_PADDED, IS_MASKED).to(q.dtype)
        scores = _dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        if IS_MASKED:
            visible = positions[None, :] <= row_positions[:, None]
            if HAS_WINDOW:
                visible = visible & (positions[None, :] > row_positions[:, None] - window)
            scores = tl.where(visible, scores, _NOTHING)
        greatest = tl.maximum(peak, tl.max(scores, 1) * scale)
        base = tl.where(greatest == _NOTHING, 0.0, greatest)
        weights = tl.exp2(tl.fma(scores, scale, -base[:, None]))
        shrink = tl.exp2(peak - base)
        weight = tl.fma(weight, shrink, tl.sum(weights, 1))
        v = _tile(v_ptr + places, readable, HEAD_DIM, HEAD_DIM_PADDED, IS_MASKED).to(q.dtype)
        acc = _dot(weights.to(q.dtype), v, acc * shrink[:, None])
        peak = greatest
    return peak, weight, acc


@triton.jit
def _tile(pointers, readable, HEAD_DIM: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr, IS_MASKED: tl.constexpr):
    """[BLOCK_N, HEAD_DIM_PADDED] of K or V, zero where it is not to be read."""
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    if IS_MASKED:
        tile = tl.load(pointers, mask=readable[:, None] & (dims < HEAD_DIM), other=0.0)
    elif HEAD_DIM == HEAD_DIM_PADDED:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=dims < HEAD_DIM, other=0.0)
    return tile


@triton.jit
def _dot(a, b, acc):
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def merged(total_peak, total_weight, total, peak, weight, acc):
    """The state over the keys of both; exactly the other one where one of them has seen nothing."""
    greatest = tl.maximum(total_peak, peak)
    base = tl.where(greatest == _NOTHING, 0.0, greatest)
    old = tl.exp2(total_peak - base)
    new = tl.exp2(peak - base)
    return greatest, tl.fma(total_weight, old, weight * new), tl.fma(total, old[:, None], acc * new[:, None])


@triton.jit
def normalized(weight, acc, v_scale, HAS_SCALES: tl.constexpr):
    """The weighted mean of the values; zeros where nothing was seen."""
    result = tl.div_rn(acc, tl.where(weight == 0.0, 1.0, weight)[:, None])
    if HAS_SCALES:
        result = result * v_scale
    return result
