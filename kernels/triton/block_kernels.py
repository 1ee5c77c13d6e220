"""The kernels of `kernels.triton.blocks`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.reference.blocks import HEADER_PAIRS, LANES

#: What `move_kernel` does.
WRITES, READS, DIGESTS = (tl.constexpr(mode) for mode in range(3))
_HEADER_PAIRS = tl.constexpr(HEADER_PAIRS)
_LANES = tl.constexpr(LANES)


@triton.jit(do_not_specialize=["seed", "nonce"])
def stretch_kernel(keys, num_pairs, seed: tl.int64, nonce: tl.int64, counters: tl.constexpr):
    """Counter c gives pairs 2c and 2c + 1."""
    index = tl.program_id(0) * counters + tl.arange(0, counters)
    low = index.to(tl.uint32)
    high = low * 0
    nonce_low = high + nonce.to(tl.uint32)
    nonce_high = high + (nonce >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, nonce_low, nonce_high)
    first = a.to(tl.uint64) | (b.to(tl.uint64) << 32)
    second = c.to(tl.uint64) | (d.to(tl.uint64) << 32)
    tl.store(keys + 2 * index, first.to(tl.int64, bitcast=True), mask=2 * index < num_pairs)
    tl.store(keys + 2 * index + 1, second.to(tl.int64, bitcast=True), mask=2 * index + 1 < num_pairs)


@triton.jit
def _products(low, high, pair):
    """One term of a lane's sum for each pair of words."""
    left = low + pair.to(tl.uint32)
    right = high + (pair >> 32).to(tl.uint32)
    return left.to(tl.uint64) * right.to(tl.uint64)


@triton.jit(do_not_specialize=["num_blocks"])
def move_kernel(
    cache,
    other,
    block_ids,
    other_words,
    keys,
    sums,
    num_blocks,
    num_pieces,
    pieces_per_run,
    block_words,
    first_word,
    run_words,
    run_stride,
    packed_words,
    mode: tl.constexpr,
    is_packed: tl.constexpr,
    group: tl.constexpr,
    tile_words: tl.constexpr,
    num_tiles: tl.constexpr,
):
    """Copies a piece of one run, at most num_tiles * tile_words words, of `group` blocks, and stores its sums.

    `other`: packed blocks one behind the other, or memory with one run for each block, which begin at `other_words`.
    """
    piece = tl.program_id(0) % num_pieces
    rows = tl.program_id(0) // num_pieces * group + tl.arange(0, group)
    is_row = rows < num_blocks
    blocks = tl.load(block_ids + rows, mask=is_row, other=0)
    run = piece // pieces_per_run
    begin = piece % pieces_per_run * (tile_words * num_tiles)
    in_cache = cache + blocks * block_words + (first_word + run * run_stride)
    if mode == DIGESTS:
        in_other = in_cache
    elif is_packed:
        in_other = other + rows.to(tl.int64) * packed_words + run * run_words
    else:
        # 16 bytes at a time.
        in_other = other + tl.multiple_of(tl.load(other_words + rows, mask=is_row, other=0), 2)
    run_keys = keys + _HEADER_PAIRS + run * run_words
    sum_0 = tl.zeros([group, tile_words], tl.uint64)
    sum_1 = tl.zeros([group, tile_words], tl.uint64)
    sum_2 = tl.zeros([group, tile_words], tl.uint64)
    sum_3 = tl.zeros([group, tile_words], tl.uint64)
    for tile in range(num_tiles):
        words = begin + tile * tile_words + tl.arange(0, tile_words)
        is_word = words < run_words
        mask = is_row[:, None] & is_word[None, :]
        cache_at = in_cache[:, None] + words[None, :]
        other_at = in_other[:, None] + words[None, :]
        if mode == WRITES:
            data = tl.load(cache_at, mask=mask, other=0)
            tl.store(other_at, data, mask=mask)
        else:
            data = tl.load(other_at, mask=mask, other=0)
            if mode != DIGESTS:
                tl.store(cache_at, data, mask=mask)
        low = data.to(tl.uint32)
        high = (data >> 32).to(tl.uint32)
        # Beyond the run both data and key are 0, and so is their product.
        at = (run_keys + words)[None, :]
        is_key = is_word[None, :]
        sum_0 += _products(low, high, tl.load(at, mask=is_key, other=0))
        sum_1 += _products(low, high, tl.load(at + 1, mask=is_key, other=0))
        sum_2 += _products(low, high, tl.load(at + 2, mask=is_key, other=0))
        sum_3 += _products(low, high, tl.load(at + 3, mask=is_key, other=0))
    out = sums + (rows.to(tl.int64) * num_pieces + piece) * _LANES
    tl.store(out, tl.sum(sum_0, 1).to(tl.int64, bitcast=True), mask=is_row)
    tl.store(out + 1, tl.sum(sum_1, 1).to(tl.int64, bitcast=True), mask=is_row)
    tl.store(out + 2, tl.sum(sum_2, 1).to(tl.int64, bitcast=True), mask=is_row)
    tl.store(out + 3, tl.sum(sum_3, 1).to(tl.int64, bitcast=True), mask=is_row)


@triton.jit
def finish_kernel(sums, keys, digests, num_pieces, packed_bytes, at_once: tl.constexpr):
    """Adds the sums of a block's pieces; each lane becomes 32 bits of its digest."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, _LANES)
    total = tl.zeros([at_once, _LANES], tl.int64)
    for start in range(0, num_pieces, at_once):
        pieces = start + tl.arange(0, at_once)
        at = sums + (row * num_pieces + pieces[:, None]) * _LANES + lanes[None, :]
        total += tl.load(at, mask=pieces[:, None] < num_pieces, other=0)
    lane = (tl.sum(total, 0) + packed_bytes).to(tl.uint64, bitcast=True)
    constant = tl.load(keys + 3 * lanes).to(tl.uint64, bitcast=True)
    of_low = tl.load(keys + 3 * lanes + 1).to(tl.uint64, bitcast=True)
    of_high = tl.load(keys + 3 * lanes + 2).to(tl.uint64, bitcast=True)
    mixed = constant + of_low * lane.to(tl.uint32).to(tl.uint64) + of_high * (lane >> 32)
    tl.store(digests + row * _LANES + lanes, (mixed >> 32).to(tl.uint32).to(tl.int32, bitcast=True))
