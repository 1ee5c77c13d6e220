"""The attention kernels: one for sequences with one row, one for chunks of several, and one that merges splits.

The query heads of a group share a KV head. They are rows of the same tile of scores, so that a key is read once for all
of them: row r of a tile is query row r // group_size, head r % group_size.

Source: Flash-Decoding (Dao et al. 2023) for the splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention_softmax import Context, attend, initial_state, merge, normalize

#: Arguments that change from step to step: specialized on their values, kernels would compile again while serving.
#: They must not be elements of a tuple, for which Triton ignores this.
_VARYING = ["layer", "window", "num_splits", "split_tokens", "num_sequences", "stride_table"]
_INDICES = ["query_starts_ptr", "context_lens_ptr", "tables_ptr"]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)
def decode_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    q,
    cache,
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    stride_table,
    layer,
    scale,
    window,
    num_splits,
    split_tokens,
    SHAPE: tl.constexpr,
    EVEN_SPLITS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Grid (num_sequences, num_kv_heads, num_splits). `scale` is for exp2: the softmax scale times log2(e).

    q: `HeadPointers`; cache: `CachePointers`. A split's `acc` goes to `partial_ptr`, its m_i and
    l_i to `stats_ptr`; without splits the result goes to `out_ptr`.
    """
    GROUP_SIZE: tl.constexpr = SHAPE.group_size
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    NUM_HEADS: tl.constexpr = SHAPE.num_kv_heads * SHAPE.group_size
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_starts_ptr + sequence)
    if tl.load(query_starts_ptr + sequence + 1) - token != 1:
        return
    hi = tl.load(context_lens_ptr + sequence).to(tl.int32)
    lo = _first_visible(hi - 1, window, SHAPE.has_window)
    origin, tokens = _splits(lo, hi, num_splits, split_tokens, SHAPE.block_n, EVEN_SPLITS)
    begin = tl.maximum(origin + split * tokens, lo // SHAPE.block_n * SHAPE.block_n)
    end = tl.minimum(origin + (split + 1) * tokens, hi)
    if (begin >= end) & (num_splits > 1):
        return
    in_group = tl.arange(0, SHAPE.block_m)
    heads = (kv_head * GROUP_SIZE + in_group)[:, None]
    dims = tl.arange(0, SHAPE.head_dim_padded)[None, :]
    mask = (in_group < GROUP_SIZE)[:, None] & (dims < HEAD_DIM)
    q_tile = tl.load(q.ptr + token * q.stride_row + heads * q.stride_head + dims, mask=mask, other=0.0)
    k_scale, v_scale = _scales(cache, layer, kv_head, SHAPE)
    # One tile of many has masked keys: masking them all costs less than a second loop.
    m_i, l_i, acc = attend(
        q_tile,
        _context(cache, layer, kv_head, tables_ptr + sequence * stride_table, lo, hi),
        hi - 1 + in_group * 0,
        begin,
        begin,
        end,
        scale * k_scale,
        window,
        SHAPE,
        False,
    )
    if IS_SPLIT:
        partial = (sequence * NUM_HEADS + heads) * num_splits + split
        tl.store(partial_ptr + partial * HEAD_DIM + dims, acc, mask=mask)
        stats_ptr += (sequence * NUM_HEADS + kv_head * GROUP_SIZE + in_group) * (2 * num_splits) + 2 * split
        tl.store(stats_ptr, m_i, mask=in_group < GROUP_SIZE)
        tl.store(stats_ptr + 1, l_i, mask=in_group < GROUP_SIZE)
    else:
        result = normalize(l_i, acc, v_scale, SHAPE.has_scales).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (token * NUM_HEADS + heads) * HEAD_DIM + dims, result, mask=mask)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)
def combine_kernel(
    out_ptr,
    partial_ptr,
    stats_ptr,
    cache,
    query_starts_ptr,
    context_lens_ptr,
    layer,
    window,
    num_splits,
    split_tokens,
    SHAPE: tl.constexpr,
    EVEN_SPLITS: tl.constexpr,
):
    """Grid (num_sequences, num_heads): merges the splits of each sequence's context in ascending order."""
    GROUP_SIZE: tl.constexpr = SHAPE.group_size
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    NUM_HEADS: tl.constexpr = SHAPE.num_kv_heads * SHAPE.group_size
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    token = tl.load(query_starts_ptr + sequence)
    if tl.load(query_starts_ptr + sequence + 1) - token != 1:
        return
    hi = tl.load(context_lens_ptr + sequence).to(tl.int32)
    lo = _first_visible(hi - 1, window, SHAPE.has_window)
    origin, tokens = _splits(lo, hi, num_splits, split_tokens, SHAPE.block_n, EVEN_SPLITS)
    dims = tl.arange(0, SHAPE.head_dim_padded)[None, :]
    first_partial = (sequence * NUM_HEADS + head) * num_splits + tl.arange(0, 1)
    m_i, l_i, acc = initial_state(1, SHAPE.head_dim_padded)
    for split in tl.range(0, tl.cdiv(hi - origin, tokens), num_stages=4):
        partial = first_partial + split
        m_j = tl.load(stats_ptr + partial * 2)
        l_j = tl.load(stats_ptr + partial * 2 + 1)
        acc_j = tl.load(partial_ptr + partial[:, None] * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        m_i, l_i, acc = merge(m_i, l_i, acc, m_j, l_j, acc_j)
    _, v_scale = _scales(cache, layer, head // GROUP_SIZE, SHAPE)
    result = normalize(l_i, acc, v_scale, SHAPE.has_scales).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (token * NUM_HEADS + head) * HEAD_DIM + dims, result, mask=dims < HEAD_DIM)


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_INDICES)
def prefill_kernel(
    out_ptr,
    q,
    cache,
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    stride_table,
    layer,
    scale,
    window,
    num_sequences,
    split_tokens,
    SHAPE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
):
    """Grid (num_tokens // TILE_ROWS + num_sequences, num_kv_heads): sequence i has a tile for each TILE_ROWS rows.

    Its tiles begin at query_starts[i] // TILE_ROWS + i; there may be one unused tile before the next sequence's.
    """
    GROUP_SIZE: tl.constexpr = SHAPE.group_size
    HEAD_DIM: tl.constexpr = SHAPE.head_dim
    BLOCK_N: tl.constexpr = SHAPE.block_n
    TILE_ROWS: tl.constexpr = SHAPE.block_m // SHAPE.group_size
    # The last tiles of a chunk have the most keys, so they run first.
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
    lo = _first_visible(first_position, window, SHAPE.has_window)
    tile_row = tl.arange(0, SHAPE.block_m)
    row = tile_row // GROUP_SIZE
    dims = tl.arange(0, SHAPE.head_dim_padded)[None, :]
    mask = (row < tile_rows)[:, None] & (dims < HEAD_DIM)
    tokens = (first_token + first_row + row)[:, None]
    heads = (kv_head * GROUP_SIZE + tile_row % GROUP_SIZE)[:, None]
    q_tile = tl.load(q.ptr + tokens * q.stride_row + heads * q.stride_head + dims, mask=mask, other=0.0)
    table_ptr = tables_ptr + tl.cast(sequence, tl.int64) * stride_table
    context = _context(cache, layer, kv_head, table_ptr, lo, hi)
    k_scale, v_scale = _scales(cache, layer, kv_head, SHAPE)
    scale = scale * k_scale
    positions = first_position + row
    first_tile = lo // BLOCK_N * BLOCK_N
    # Without a window every row sees the tiles of keys before this: most of a long prompt needs no mask.
    unmasked_end = (first_position + 1) // BLOCK_N * BLOCK_N
    HAS_UNMASKED: tl.constexpr = not SHAPE.has_window
    if IS_SPLIT:
        origin = lo // split_tokens * split_tokens
        m_i, l_i, acc = initial_state(SHAPE.block_m, SHAPE.head_dim_padded)
        for split in range(0, tl.cdiv(hi - origin, split_tokens)):
            begin = tl.maximum(origin + split * split_tokens, first_tile)
            end = tl.minimum(origin + (split + 1) * split_tokens, hi)
            m_j, l_j, acc_j = attend(
                q_tile, context, positions, begin, unmasked_end, end, scale, window, SHAPE, HAS_UNMASKED
            )
            m_i, l_i, acc = merge(m_i, l_i, acc, m_j, l_j, acc_j)
    else:
        m_i, l_i, acc = attend(
            q_tile, context, positions, first_tile, unmasked_end, hi, scale, window, SHAPE, HAS_UNMASKED
        )
    result = normalize(l_i, acc, v_scale, SHAPE.has_scales).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (tokens * (SHAPE.num_kv_heads * GROUP_SIZE) + heads) * HEAD_DIM + dims, result, mask=mask)


@triton.jit
def _context(cache, layer, kv_head, table_ptr, lo, hi):
    """The `Context` of a sequence."""
    k_ptr = cache.ptr + tl.cast(layer, tl.int64) * cache.stride_layer + kv_head * cache.stride_head
    return Context(
        k_ptr=k_ptr,
        v_ptr=k_ptr + cache.stride_kv,
        table_ptr=table_ptr,
        stride_block=cache.stride_block,
        stride_slot=cache.stride_slot,
        lo=lo,
        hi=hi,
    )


@triton.jit
def _scales(cache, layer, kv_head, SHAPE: tl.constexpr):
    """What stored K and V are multiplied by."""
    k_scale = 1.0
    v_scale = 1.0
    if SHAPE.has_scales:
        k_scale_ptr = cache.scales_ptr + layer * (2 * SHAPE.num_kv_heads) + kv_head
        k_scale = tl.load(k_scale_ptr)
        v_scale = tl.load(k_scale_ptr + SHAPE.num_kv_heads)
    return k_scale, v_scale


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
def _first_visible(position, window, HAS_WINDOW: tl.constexpr):
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
