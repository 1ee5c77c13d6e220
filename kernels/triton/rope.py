"""Rotary position embedding of q and k and the write of K and V to the cache, in one launch.

A program does one row's KV head and the query heads that share it. Halves of a head are read apart, because rotation
pairs element j with element j + head_dim / 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The largest finite number of float8_e4m3fn.
FP8_MAX = tl.constexpr(448.0)


def rope_write_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    kv_cache: Tensor,
    layer: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Writes the rotated k, and v, to the rows' slots of `layer`; returns the rotated q, contiguous.

    q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; any strides but a contiguous last
    dimension. positions, slot_mapping: int64 [num_tokens]; a row with slot -1 is written nowhere. cos_sin: float32
    [max_positions, 2, head_dim]. kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of q's
    dtype, or float8_e4m3fn with `kv_scales`, float32 [num_layers, 2, num_kv_heads]: stored is x / scale, saturated.

    norms: weights [head_dim] of an RMS norm over each head of q and of k before the rotation, rounded as
    `kernels.ops.Ops.rms_norm` rounds. A row that opens a block clears what no row of this launch writes of it.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    assert k.shape == v.shape == (num_tokens, num_kv_heads, head_dim)
    assert num_heads % num_kv_heads == 0
    assert head_dim % 2 == 0
    assert head_dim <= 256
    assert q.stride(2) == k.stride(2) == v.stride(2) == kv_cache.stride(5) == 1
    assert kv_cache.shape[2] == 2
    assert kv_cache.shape[5] == head_dim
    assert kv_cache.dtype == (q.dtype if kv_scales is None else torch.float8_e4m3fn)
    assert positions.shape == slot_mapping.shape == (num_tokens,)
    assert positions.stride(0) == slot_mapping.stride(0) == 1 or num_tokens < 2
    assert cos_sin.dtype == torch.float32
    assert cos_sin.is_contiguous()
    assert cos_sin.shape[1:] == (2, head_dim)
    assert norms is None or all(weight.shape == (head_dim,) and weight.is_contiguous() for weight in norms)
    if kv_scales is not None:
        assert kv_scales.shape == (kv_cache.shape[1], 2, num_kv_heads)
        assert kv_scales.dtype == torch.float32
        assert kv_scales.is_contiguous()
    rotated = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return rotated
    share = num_heads // num_kv_heads
    q_norm, k_norm = norms or (q, q)
    _rope_write_kv_kernel[(num_tokens, num_kv_heads)](
        rotated,
        q,
        k,
        v,
        kv_cache,
        cos_sin,
        positions,
        slot_mapping,
        q_norm,
        k_norm,
        q if kv_scales is None else kv_scales,
        eps,
        layer,
        num_tokens,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *kv_cache.stride()[:5],
        NUM_KV_HEADS=num_kv_heads,
        SHARE=share,
        SHARE_PADDED=triton.next_power_of_2(share),
        HEAD_DIM=head_dim,
        HALF_PADDED=triton.next_power_of_2(head_dim // 2),
        BLOCK_SIZE=block_size,
        BLOCK_SIZE_PADDED=triton.next_power_of_2(block_size),
        HAS_NORMS=norms is not None,
        HAS_SCALES=kv_scales is not None,
        num_warps=1 if share * head_dim <= 512 else 4,
        # Sums that are to be fused are written as such: no compiler's choice changes a bit.
        enable_fp_fusion=False,
    )
    return rotated


@triton.jit(do_not_specialize=["layer", "num_tokens"], do_not_specialize_on_alignment=["positions_ptr", "slots_ptr"])
def _rope_write_kv_kernel(
    rotated_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cache_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    scales_ptr,
    eps,
    layer,
    num_tokens,
    stride_q_row,
    stride_q_head,
    stride_k_row,
    stride_k_head,
    stride_v_row,
    stride_v_head,
    stride_block,
    stride_layer,
    stride_side,
    stride_head,
    stride_slot,
    NUM_KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    SHARE_PADDED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SIZE_PADDED: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    dims = tl.arange(0, HALF_PADDED)[None, :]
    inside = dims < HALF

    angles_ptr = cos_sin_ptr + tl.load(positions_ptr + row) * (2 * HEAD_DIM) + dims
    cos_low = tl.load(angles_ptr, mask=inside, other=0.0)
    cos_high = tl.load(angles_ptr + HALF, mask=inside, other=0.0)
    sin_low = tl.load(angles_ptr + HEAD_DIM, mask=inside, other=0.0)
    sin_high = tl.load(angles_ptr + HEAD_DIM + HALF, mask=inside, other=0.0)

    shared = tl.arange(0, SHARE_PADDED)[:, None]
    heads = kv_head * SHARE + shared
    mask = inside & (shared < SHARE)
    from_ptr = q_ptr + row * stride_q_row + heads * stride_q_head + dims
    low, high = _normed_halves(from_ptr, mask, inside, q_norm_ptr + dims, eps, HEAD_DIM, HAS_NORMS)
    to_ptr = rotated_ptr + row * (NUM_KV_HEADS * SHARE * HEAD_DIM) + heads * HEAD_DIM + dims
    _store(to_ptr, tl.fma(high, -sin_low, low * cos_low), 1.0, mask, False)
    _store(to_ptr + HALF, tl.fma(low, sin_high, high * cos_high), 1.0, mask, False)

    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    k_scale = 1.0
    v_scale = 1.0
    if HAS_SCALES:
        k_scale = tl.load(scales_ptr + layer * (2 * NUM_KV_HEADS) + kv_head)
        v_scale = tl.load(scales_ptr + layer * (2 * NUM_KV_HEADS) + NUM_KV_HEADS + kv_head)
    layer_ptr = cache_ptr + tl.cast(layer, tl.int64) * stride_layer + kv_head * stride_head
    base_ptr = layer_ptr + slot // BLOCK_SIZE * stride_block
    offset = (slot % BLOCK_SIZE).to(tl.int32)
    to_ptr = base_ptr + offset * stride_slot + dims
    from_ptr = k_ptr + row * stride_k_row + kv_head * stride_k_head + dims
    low, high = _normed_halves(from_ptr, inside, inside, k_norm_ptr + dims, eps, HEAD_DIM, HAS_NORMS)
    _store(to_ptr, tl.fma(high, -sin_low, low * cos_low), k_scale, inside, HAS_SCALES)
    _store(to_ptr + HALF, tl.fma(low, sin_high, high * cos_high), k_scale, inside, HAS_SCALES)
    from_ptr = v_ptr + row * stride_v_row + kv_head * stride_v_head + dims
    low = tl.load(from_ptr, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(from_ptr + HALF, mask=inside, other=0.0).to(tl.float32)
    _store(to_ptr + stride_side, low, v_scale, inside, HAS_SCALES)
    _store(to_ptr + stride_side + HALF, high, v_scale, inside, HAS_SCALES)

    if offset == 0:
        # Programs have no order, so only what none of them writes may be cleared. Rows of a sequence are consecutive:
        # the block's j-th slot is written by the j-th row from here, or by none.
        ahead = tl.arange(0, BLOCK_SIZE_PADDED)
        others = tl.load(slots_ptr + row + ahead, mask=row + ahead < num_tokens, other=-1)
        unwritten = (ahead < BLOCK_SIZE) & (others != slot + ahead)
        cleared_ptr = base_ptr + ahead[:, None] * stride_slot + dims
        _clear(cleared_ptr, unwritten[:, None] & inside, HALF)
        _clear(cleared_ptr + stride_side, unwritten[:, None] & inside, HALF)


@triton.jit
def _clear(to_ptr, mask, HALF: tl.constexpr):
    zeros = tl.zeros(to_ptr.shape, tl.float32).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr, zeros, mask=mask)
    tl.store(to_ptr + HALF, zeros, mask=mask)


@triton.jit
def _normed_halves(from_ptr, mask, inside, weight_ptr, eps, HEAD_DIM: tl.constexpr, HAS_NORMS: tl.constexpr):
    """Both halves of some heads in float32; normed ones are rounded to their dtype before and after the weight."""
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
    # Three bits follow the leading one; below 2^-6 the step no longer shrinks. Adding 1.5 * 2^23 steps rounds to one.
    exponent = tl.maximum((values.to(tl.int32, bitcast=True) >> 23) & 0xFF, 121)
    magic = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (values + magic) - magic
