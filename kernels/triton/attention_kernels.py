"""The kernels of paged attention: one for sequences with one row, one for chunks of several, one that merges splits.

The query heads that share a KV head are rows of the same tile of scores, so that a key is read once for all of them:
row r of a tile is query row r // SHARE, head r % SHARE.

Source: Flash-Decoding (Dao et al. 2023) for the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_softmax import attend, merged, normalized, nothing_seen

#: What changes from step to step must not make a kernel compile again in the middle of serving.
_VARYING = ["layer", "window", "num_splits", "split_tokens", "num_sequences", "stride_table"]
_INDICES = ["query_starts_ptr", "context_lens_ptr", "tables_ptr"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)
def decode_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    q_ptr,
    cache_ptr,
    scales_ptr,
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    layer,
    scale,
    window,
    num_splits,
    split_tokens,
    stride_q_row,
    stride_q_head,
    stride_table,
    stride_block,
    stride_layer,
    stride_side,
    stride_head,
    stride_slot,
    NUM_KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_SPLITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Grid (num_sequences, num_kv_heads, num_splits). `scale` is in powers of two: softmax scale * log2(e)."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_starts_ptr + sequence)
    if tl.load(query_starts_ptr + sequence + 1) - token != 1:
        return
    hi = tl.load(context_lens_ptr + sequence).to(tl.int32)
    lo = _first_seen(hi - 1, window, HAS_WINDOW)
    origin, tokens = _splits(lo, hi, num_splits, split_tokens, BLOCK_N, EVEN_SPLITS)
    begin = tl.maximum(origin + split * tokens, lo // BLOCK_N * BLOCK_N)
    end = tl.minimum(origin + (split + 1) * tokens, hi)
    if (begin >= end) & (num_splits > 1):
        return
    shared = tl.arange(0, BLOCK_M)
    heads = (kv_head * SHARE + shared)[:, None]
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = (shared < SHARE)[:, None] & (dims < HEAD_DIM)
    q = tl.load(q_ptr + token * stride_q_row + heads * stride_q_head + dims, mask=mask, other=0.0)
    k_ptr = cache_ptr + tl.cast(layer, tl.int64) * stride_layer + kv_head * stride_head
    v_scale = 1.0
    if HAS_SCALES:
        scales_ptr += layer * (2 * NUM_KV_HEADS) + kv_head
        scale = scale * tl.load(scales_ptr)
        v_scale = tl.load(scales_ptr + NUM_KV_HEADS)
    # One tile of many has keys that are not seen: masking them all costs less than a second loop.
    peak, weight, acc = attend(
        q,
        k_ptr,
        k_ptr + stride_side,
        tables_ptr + sequence * stride_table,
        hi - 1 + shared * 0,
        begin,
        begin,
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
        BLOCK_M,
        BLOCK_N,
        HAS_WINDOW,
        False,
    )
    head_of_sequence = sequence * (NUM_KV_HEADS * SHARE) + heads
    if IS_SPLIT:
        place = head_of_sequence * num_splits + split
        tl.store(partial_ptr + place * HEAD_DIM + dims, acc, mask=mask)
        stats_ptr += (sequence * (NUM_KV_HEADS * SHARE) + kv_head * SHARE + shared) * (2 * num_splits) + 2 * split
        tl.store(stats_ptr, peak, mask=shared < SHARE)
        tl.store(stats_ptr + 1, weight, mask=shared < SHARE)
    else:
        result = normalized(weight, acc, v_scale, HAS_SCALES).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token * (NUM_KV_HEADS * SHARE) + heads) * HEAD_DIM + dims, result, mask=mask)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)
def combine_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    scales_ptr,
    query_starts_ptr,
    context_lens_ptr,
    layer,
    window,
    num_splits,
    split_tokens,
    NUM_KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EVEN_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Grid (num_sequences, num_heads): merges in ascending order the splits that a sequence's context has."""
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(query_starts_ptr + sequence)
    if tl.load(query_starts_ptr + sequence + 1) - token != 1:
        return
    hi = tl.load(context_lens_ptr + sequence).to(tl.int32)
    lo = _first_seen(hi - 1, window, HAS_WINDOW)
    origin, tokens = _splits(lo, hi, num_splits, split_tokens, BLOCK_N, EVEN_SPLITS)
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    one = tl.arange(0, 1)
    first = (sequence * (NUM_KV_HEADS * SHARE) + head) * num_splits + one
    total_peak, total_weight, total = nothing_seen(1, HEAD_DIM_PADDED)
    for split in tl.range(0, tl.cdiv(hi - origin, tokens), num_stages=4):
        place = first + split
        peak = tl.load(stats_ptr + place * 2)
        weight = tl.load(stats_ptr + place * 2 + 1)
        acc = tl.load(partial_ptr + place[:, None] * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        total_peak, total_weight, total = merged(total_peak, total_weight, total, peak, weight, acc)
    v_scale = 1.0
    if HAS_SCALES:
        v_scale = tl.load(scales_ptr + layer * (2 * NUM_KV_HEADS) + NUM_KV_HEADS + head // SHARE)
    result = normalized(total_weight, total, v_scale, HAS_SCALES).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * (NUM_KV_HEADS * SHARE) + head) * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)
def prefill_kernel(
    out_ptr,
    q_ptr,
    cache_ptr,
    scales_ptr,
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    layer,
    scale,
    window,
    num_sequences,
    split_tokens,
    stride_q_row,
    stride_q_head,
    stride_table,
    stride_block,
    stride_layer,
    stride_side,
    stride_head,
    stride_slot,
    NUM_KV_HEADS: tl.constexpr,
    SHARE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
):
    """Grid (num_tokens // TILE_ROWS + num_sequences, num_kv_heads): sequence i has a tile for each TILE_ROWS rows.

    Its tiles begin at query_starts[i] // TILE_ROWS + i; there may be one more before the next sequence's.
    """
    TILE_ROWS: tl.constexpr = BLOCK_M // SHARE
    # The last tiles of a chunk have the most to do, so they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = _sequence_of(tile, query_starts_ptr, num_sequences, TILE_ROWS)
    first_token = tl.load(query_starts_ptr + sequence)
    num_rows = (tl.load(query_starts_ptr + sequence + 1) - first_token).to(tl.int32)
    first_row = (tile - (first_token // TILE_ROWS).to(tl.int32) - sequence) * TILE_ROWS
    if (num_rows <= 1) | (first_row >= num_rows):
        return
    first_position = tl.load(context_lens_ptr + sequence).to(tl.int32) - num_rows + first_row
    tile_rows = tl.minimum(TILE_ROWS, num_rows - first_row)
    hi = first_position + tile_rows
    lo = _first_seen(first_position, window, HAS_WINDOW)
    packed = tl.arange(0, BLOCK_M)
    row = packed // SHARE
    dims = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    mask = (row < tile_rows)[:, None] & (dims < HEAD_DIM)
    tokens = (first_token + first_row + row)[:, None]
    heads = (kv_head * SHARE + packed % SHARE)[:, None]
    q = tl.load(q_ptr + tokens * stride_q_row + heads * stride_q_head + dims, mask=mask, other=0.0)
    k_ptr = cache_ptr + tl.cast(layer, tl.int64) * stride_layer + kv_head * stride_head
    v_ptr = k_ptr + stride_side
    table_ptr = tables_ptr + tl.cast(sequence, tl.int64) * stride_table
    v_scale = 1.0
    if HAS_SCALES:
        scales_ptr += layer * (2 * NUM_KV_HEADS) + kv_head
        scale = scale * tl.load(scales_ptr)
        v_scale = tl.load(scales_ptr + NUM_KV_HEADS)
    first_key = lo // BLOCK_N * BLOCK_N
    # Tiles of keys before this are seen by every row without a window: most of a long prompt needs no mask.
    seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
    if IS_SPLIT:
        origin = lo // split_tokens * split_tokens
        total_peak, total_weight, total = nothing_seen(BLOCK_M, HEAD_DIM_PADDED)
        for split in range(0, tl.cdiv(hi - origin, split_tokens)):
            begin = tl.maximum(origin + split * split_tokens, first_key)
            end = tl.minimum(origin + (split + 1) * split_tokens, hi)
            peak, weight, acc = attend(
                q,
                k_ptr,
                v_ptr,
                table_ptr,
                first_position + row,
                begin,
                seen_by_all,
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
                BLOCK_M,
                BLOCK_N,
                HAS_WINDOW,
                not HAS_WINDOW,
            )
            total_peak, total_weight, total = merged(total_peak, total_weight, total, peak, weight, acc)
    else:
        total_peak, total_weight, total = attend(
            q,
            k_ptr,
            v_ptr,
            table_ptr,
            first_position + row,
            first_key,
            seen_by_all,
            hi,
            lo,
            hi,
            scale,
            window,
            stride_block,
            stride_slot,
            HEAD_DIM,
            HEAD_DIM_PADDED,
            BLOCK_SIZE,
            BLOCK_M,
            BLOCK_N,
            HAS_WINDOW,
            not HAS_WINDOW,
        )
    result = normalized(total_weight, total, v_scale, HAS_SCALES).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (tokens * (NUM_KV_HEADS * SHARE) + heads) * HEAD_DIM + dims, result, mask=mask)


@triton.jit
def _sequence_of(tile, query_starts_ptr, num_sequences, TILE_ROWS: tl.constexpr):
    """The last sequence whose tiles begin at or before `tile`."""
    left = 0
    right = num_sequences
    while left < right:
        middle = (left + right) // 2
        first_tile = (tl.load(query_starts_ptr + middle) // TILE_ROWS).to(tl.int32) + middle
        if first_tile <= tile:
            left = middle + 1
        else:
            right = middle
    return left - 1


@triton.jit
def _first_seen(position, window, HAS_WINDOW: tl.constexpr):
    first = position * 0
    if HAS_WINDOW:
        first = tl.maximum(position - window + 1, 0)
    return first


@triton.jit
def _splits(lo, hi, num_splits, split_tokens, BLOCK_N: tl.constexpr, EVEN_SPLITS: tl.constexpr):
    """Where the first split of the keys [lo, hi) begins, and how many keys a split has."""
    if EVEN_SPLITS:
        origin = lo // BLOCK_N * BLOCK_N
        tokens = tl.maximum(tl.cdiv(tl.cdiv(hi - origin, num_splits), BLOCK_N) * BLOCK_N, BLOCK_N)
    else:
        origin = lo // split_tokens * split_tokens
        tokens = split_tokens
    return origin, tokens
