"""Rotary position embedding of q and k, and the write of K and V to the cache, in one launch.

A program handles one KV head of one row and the query heads that share it. It reads the halves of a head separately,
because rotation pairs element j with element j + head_dim / 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.paged_step import CachePointers, HeadPointers, PagedStep

#: The largest finite number of float8_e4m3fn.
FP8_MAX = tl.constexpr(448.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorms:
    """RMS norms of each head of q and k before the rotation, rounded as `kernels.ops.Ops.rms_norm` rounds."""

    #: Weights, [head_dim].
    q: Tensor
    k: Tensor
    eps: float


class RopeShape(NamedTuple):
    """The compile-time numbers of the kernel, passed as one constexpr."""

    num_kv_heads: int
    #: Query heads that share a KV head.
    group_size: int
    group_size_padded: int
    head_dim: int
    half_padded: int
    block_size: int
    block_size_padded: int
    has_norms: bool
    has_scales: bool


def rope_write_kv(
    q: Tensor, k: Tensor, v: Tensor, step: PagedStep, layer: int, norms: HeadNorms | None = None
) -> Tensor:
    """Writes the rotated k, and v, to the rows' slots of `layer`; returns the rotated q, contiguous.

    q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; any strides but a contiguous last
    dimension. A row with slot -1 is not written. A row that opens a block clears the slots of it that no row of this
    launch writes.
    """
    _check(q, k, v, step, norms)
    num_tokens, num_heads, head_dim = q.shape
    rotated = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return rotated
    shape = _shape(step, num_heads, has_norms=norms is not None)
    _rope_write_kv_kernel[(num_tokens, step.num_kv_heads)](
        rotated,
        HeadPointers.of(q),
        HeadPointers.of(k),
        HeadPointers.of(v),
        CachePointers.of(step),
        step.cos_sin,
        step.rows.positions,
        step.rows.slot_mapping,
        q if norms is None else norms.q,
        q if norms is None else norms.k,
        0.0 if norms is None else norms.eps,
        layer,
        num_tokens,
        SHAPE=shape,
        num_warps=1 if shape.group_size * head_dim <= 512 else 4,
        # Fused sums are written explicitly, so that no choice of the compiler changes a bit.
        enable_fp_fusion=False,
    )
    return rotated


def _shape(step: PagedStep, num_heads: int, *, has_norms: bool) -> RopeShape:
    group_size = num_heads // step.num_kv_heads
    return RopeShape(
        num_kv_heads=step.num_kv_heads,
        group_size=group_size,
        group_size_padded=triton.next_power_of_2(group_size),
        head_dim=step.head_dim,
        half_padded=triton.next_power_of_2(step.head_dim // 2),
        block_size=step.block_size,
        block_size_padded=triton.next_power_of_2(step.block_size),
        has_norms=has_norms,
        has_scales=step.kv_scales is not None,
    )


def _check(q: Tensor, k: Tensor, v: Tensor, step: PagedStep, norms: HeadNorms | None) -> None:
    step.check(q)
    num_tokens, _, head_dim = q.shape
    rows = step.rows
    assert head_dim % 2 == 0
    assert k.shape == v.shape == (num_tokens, step.num_kv_heads, head_dim)
    assert k.stride(2) == v.stride(2) == 1
    assert rows.positions.shape == rows.slot_mapping.shape == (num_tokens,)
    assert rows.positions.stride(0) == rows.slot_mapping.stride(0) == 1 or num_tokens < 2
    assert step.cos_sin.dtype == torch.float32
    assert step.cos_sin.is_contiguous()
    assert step.cos_sin.shape[1:] == (2, head_dim)
    if norms is not None:
        assert norms.q.shape == norms.k.shape == (head_dim,)
        assert norms.q.is_contiguous()
        assert norms.k.is_contiguous()


@triton.jit(do_not_specialize=["layer", "num_tokens"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_write_kv_kernel(  # noqa: PLR0915
    rotated_ptr,
    q,
    k,
    v,
    cache,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    layer,
    num_tokens,
    SHAPE: tl.constexpr,
):
    """Grid (num_tokens, num_kv_heads). q, k, v: `HeadPointers`; cache: `CachePointers`."""
    GROUP_SIZE: tl.constexpr = SHAPE.group_size
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    HALF: tl.constexpr = SHAPE.head_dim // 2
    HAS_NORMS: tl.constexpr = SHAPE.has_norms
    HAS_SCALES: tl.constexpr = SHAPE.has_scales
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    dims = tl.arange(0, SHAPE.half_padded)[None, :]
    inside = dims < HALF

    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + row) * (2 * HEAD_DIM) + dims
    cos_low = tl.load(angles_ptr, mask=inside, other=0.0)
    cos_high = tl.load(angles_ptr + HALF, mask=inside, other=0.0)
    sin_low = tl.load(angles_ptr + HEAD_DIM, mask=inside, other=0.0)
    sin_high = tl.load(angles_ptr + HEAD_DIM + HALF, mask=inside, other=0.0)

    in_group = tl.arange(0, SHAPE.group_size_padded)[:, None]
    heads = kv_head * GROUP_SIZE + in_group
    mask = inside & (in_group < GROUP_SIZE)
    from_ptr = q.ptr + row * q.stride_row + heads * q.stride_head + dims
    low, high = _normed_halves(from_ptr, mask, inside, q_norm_ptr + dims, eps, HEAD_DIM, HAS_NORMS)
    to_ptr = rotated_ptr + row * (SHAPE.num_kv_heads * GROUP_SIZE * HEAD_DIM) + heads * HEAD_DIM + dims
    _store(to_ptr, tl.fma(high, -sin_low, low * cos_low), 1.0, mask, False)
    _store(to_ptr + HALF, tl.fma(low, sin_high, high * cos_high), 1.0, mask, False)

    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    k_scale = 1.0
    v_scale = 1.0
    if HAS_SCALES:
        k_scale = tl.load(cache.scales_ptr + layer * (2 * SHAPE.num_kv_heads) + kv_head)
        v_scale = tl.load(cache.scales_ptr + layer * (2 * SHAPE.num_kv_heads) + SHAPE.num_kv_heads + kv_head)
    layer_ptr = cache.ptr + tl.cast(layer, tl.int64) * cache.stride_layer + kv_head * cache.stride_head
    base_ptr = layer_ptr + slot // SHAPE.block_size * cache.stride_block
    offset = (slot % SHAPE.block_size).to(tl.int32)
    to_ptr = base_ptr + offset * cache.stride_slot + dims
    from_ptr = k.ptr + row * k.stride_row + kv_head * k.stride_head + dims
    low, high = _normed_halves(from_ptr, inside, inside, k_norm_ptr + dims, eps, HEAD_DIM, HAS_NORMS)
    _store(to_ptr, tl.fma(high, -sin_low, low * cos_low), k_scale, inside, HAS_SCALES)
    _store(to_ptr + HALF, tl.fma(low, sin_high, high * cos_high), k_scale, inside, HAS_SCALES)
    from_ptr = v.ptr + row * v.stride_row + kv_head * v.stride_head + dims
    low = tl.load(from_ptr, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(from_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    _store(to_ptr + cache.stride_kv, low, v_scale, inside, HAS_SCALES)
    _store(to_ptr + cache.stride_kv + HALF, high, v_scale, inside, HAS_SCALES)

    if offset == 0:
        # Programs have no order, so only slots that none of them writes may be cleared. Rows of a sequence are
        # consecutive: the block's j-th slot is written by the j-th row from here, or by none.
        ahead = tl.arange(0, SHAPE.block_size_padded)
        others = tl.load(slots_ptr + row + ahead, mask=row + ahead < num_tokens, other=-1)
        unwritten = (ahead < SHAPE.block_size) & (others != slot + ahead)
        cleared_ptr = base_ptr + ahead[:, None] * cache.stride_slot + dims
        _clear(cleared_ptr, unwritten[:, None] & inside, HALF)
        _clear(cleared_ptr + cache.stride_kv, unwritten[:, None] & inside, HALF)


@triton.jit
def _clear(to_ptr, mask, HALF: tl.constexpr):
    zeros = tl.zeros(to_ptr.shape, tl.float32).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr, zeros, mask=mask)
    tl.store(to_ptr + HALF, zeros, mask=mask)


@triton.jit
def _normed_halves(from_ptr, mask, inside, weight_ptr, eps, HEAD_DIM: tl.constexpr, HAS_NORMS: tl.constexpr):
    """Both halves of some heads in float32; norms round to the heads' dtype before and after the weight."""
    dtype = from_ptr.dtype.element_ty
    low = tl.load(from_ptr, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(from_ptr + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORMS:
        mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM
        factor = tl.rsqrt(mean + eps)[:, None]
        weight_low = tl.load(weight_ptr, mask=inside, other=0.0).to(tl.float32)
        weight_high = tl.load(weight_ptr + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
        low = ((low * factor).to(dtype).to(tl.float32) * weight_low).to(dtype).to(tl.float32)
        high = ((high * factor).to(dtype).to(tl.float32) * weight_high).to(dtype).to(tl.float32)
    return low, high


@triton.jit
def _store(to_ptr, values, scale, mask, HAS_SCALES: tl.constexpr):
    if HAS_SCALES:
        values = _on_fp8_grid(tl.div_rn(values, scale))
    tl.store(to_ptr, values.to(to_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _on_fp8_grid(values):
    """Rounds float32 to what float8_e4m3fn can hold, to nearest even, saturated; NaN stays NaN.

    The cast that follows is then exact. Triton's interpreter needs that: its own rounding loses carries.
    """
    values = tl.maximum(values, -FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    values = tl.minimum(values, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    # Three bits follow the leading one; below 2^-6 the step is constant. Adding 1.5 * 2^23 steps rounds to whole steps.
    exponent = tl.maximum((values.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    magic = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (values + magic) - magic
