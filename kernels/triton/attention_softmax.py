"""Online softmax over the keys of a paged context, tile by tile, shared by the attention kernels.

Its state is FlashAttention's: for each row, the running maximum `m_i` of the scores, the running sum `l_i` of their
exponentials, and the weighted sum `acc` of the values. Keys are walked in tiles that begin at multiples of `block_n`.

Sums across tiles are explicit fused multiply-adds, and a key, tile or split that a row does not see adds an exact zero.
So with the same tiles and splits, a row has the same bits in every kernel, whatever rows it shares a tile with.

Source: FlashAttention-2 (Dao 2023).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

#: The interpreter multiplies bfloat16 as if its bits were integers.
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_MINUS_INFINITY = tl.constexpr(float("-inf"))


class AttentionShape(NamedTuple):
    """The compile-time numbers of an attention kernel, passed as one constexpr."""

    num_kv_heads: int
    #: Query heads that share a KV head.
    group_size: int
    head_dim: int
    head_dim_padded: int
    block_size: int
    #: Rows of a tile of scores.
    block_m: int
    #: Keys of a tile of scores.
    block_n: int
    has_window: bool
    has_scales: bool


class Context(NamedTuple):
    """One sequence's keys and values in one layer and KV head; only the keys [lo, hi) are read."""

    k_ptr: Any
    v_ptr: Any
    table_ptr: Any
    stride_block: Any
    stride_slot: Any
    lo: Any
    hi: Any


@triton.jit
def initial_state(ROWS: tl.constexpr, HEAD_DIM_PADDED: tl.constexpr):
    """(m_i, l_i, acc) before the first key."""
    m_i = tl.full([ROWS], _MINUS_INFINITY, tl.float32)
    return m_i, tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, HEAD_DIM_PADDED], tl.float32)


@triton.jit
def attend(
    q,
    context,
    row_positions,
    begin,
    unmasked_end,
    end,
    scale,
    window,
    SHAPE: tl.constexpr,
    HAS_UNMASKED: tl.constexpr,
):
    """(m_i, l_i, acc) over the keys [begin, end). With HAS_UNMASKED, tiles before `unmasked_end` need no mask."""
    m_i, l_i, acc = initial_state(SHAPE.block_m, SHAPE.head_dim_padded)
    masked_begin = begin
    if HAS_UNMASKED:
        masked_begin = tl.maximum(begin, tl.minimum(end, unmasked_end))
        m_i, l_i, acc = _walk(
            m_i, l_i, acc, q, context, row_positions, begin, masked_begin, scale, window, SHAPE, False
        )
    return _walk(m_i, l_i, acc, q, context, row_positions, masked_begin, end, scale, window, SHAPE, True)


@triton.jit
def _walk(
    m_i,
    l_i,
    acc,
    q,
    context,
    row_positions,
    begin,
    end,
    scale,
    window,
    SHAPE: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Updates the state with the keys [begin, end), tile by tile.

    `m_i` is in units of exp2's exponent, so that a state that meets no greater score is scaled by exactly 1.
    """
    BLOCK_N: tl.constexpr = SHAPE.block_n
    BLOCK_SIZE: tl.constexpr = SHAPE.block_size
    dims = tl.arange(0, SHAPE.head_dim_padded)[None, :]
    for start in range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        readable = (positions >= context.lo) & (positions < context.hi)
        if IS_MASKED:
            blocks = tl.load(context.table_ptr + positions // BLOCK_SIZE, mask=readable, other=0)
        else:
            blocks = tl.load(context.table_ptr + positions // BLOCK_SIZE)
        slots = blocks * context.stride_block + (positions % BLOCK_SIZE) * context.stride_slot
        offsets = slots[:, None] + dims
        # Values are masked too: no weight, not even zero, would undo a NaN of another sequence.
        k = _load_tile(context.k_ptr + offsets, readable, SHAPE, IS_MASKED).to(q.dtype)
        scores = _dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        if IS_MASKED:
            visible = positions[None, :] <= row_positions[:, None]
            if SHAPE.has_window:
                visible = visible & (positions[None, :] > row_positions[:, None] - window)
            scores = tl.where(visible, scores, _MINUS_INFINITY)
        m_ij = tl.maximum(m_i, tl.max(scores, 1) * scale)
        base = tl.where(m_ij == _MINUS_INFINITY, 0.0, m_ij)
        p = tl.exp2(tl.fma(scores, scale, -base[:, None]))
        alpha = tl.exp2(m_i - base)
        l_i = tl.fma(l_i, alpha, tl.sum(p, 1))
        v = _load_tile(context.v_ptr + offsets, readable, SHAPE, IS_MASKED).to(q.dtype)
        acc = _dot(p.to(q.dtype), v, acc * alpha[:, None])
        m_i = m_ij
    return m_i, l_i, acc


@triton.jit
def _load_tile(pointers, readable, SHAPE: tl.constexpr, IS_MASKED: tl.constexpr):
    """[block_n, head_dim_padded] of K or V, zero where it must not be read."""
    dims = tl.arange(0, SHAPE.head_dim_padded)[None, :]
    if IS_MASKED:
        tile = tl.load(pointers, mask=readable[:, None] & (dims < SHAPE.head_dim), other=0.0)
    elif SHAPE.head_dim == SHAPE.head_dim_padded:
        tile = tl.load(pointers)
    else:
        tile = tl.load(pointers, mask=dims < SHAPE.head_dim, other=0.0)
    return tile


@triton.jit
def _dot(a, b, acc):
    if _INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def merge(m_i, l_i, acc, m_j, l_j, acc_j):
    """The state over the keys of both states. Where one has seen no key, exactly the other."""
    m_ij = tl.maximum(m_i, m_j)
    base = tl.where(m_ij == _MINUS_INFINITY, 0.0, m_ij)
    alpha = tl.exp2(m_i - base)
    beta = tl.exp2(m_j - base)
    return m_ij, tl.fma(l_i, alpha, l_j * beta), tl.fma(acc, alpha[:, None], acc_j * beta[:, None])


@triton.jit
def normalize(l_i, acc, v_scale, HAS_SCALES: tl.constexpr):
    """The weighted mean of the values; zeros where no key was seen."""
    result = tl.div_rn(acc, tl.where(l_i == 0.0, 1.0, l_i)[:, None])
    if HAS_SCALES:
        result = result * v_scale
    return result
