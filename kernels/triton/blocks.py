"""Packs slices of KV blocks densely for the wire, unpacks them, or gathers them from the cache of another process.

Their digests are computed at the same time.

`kernels.reference.blocks` is the truth and explains the digest. One program copies a piece of a few blocks: each word
is read once, written once, and multiplied into four sums per block while it is in registers. A second, small kernel
adds the sums of all pieces, so that no atomics are needed. The stretched key is as long as a packed block, is made once
per transfer and is read from the L2 cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference.blocks import DIGEST_BYTES, HEADER_PAIRS, KEY_BYTES, LANES, SliceLayout, num_key_pairs

#: Words of 8 bytes that a program keeps in registers at a time: with more, too few programs fit on a processor.
_TILE_WORDS = 512
#: Tiles of a program, after which the sums of its threads are added once. Fewer if there would be too few programs.
_TILES = 16
_FEW_TILES = 4
_ENOUGH_PROGRAMS = 1024
#: Blocks of one program, which share each load of the key.
_MAX_BLOCKS = 2
_KEYS_PER_PROGRAM = 512
_ALIGNMENT = 16

#: What `_move_kernel` does.
_PACKS, _UNPACKS, _GATHERS, _DIGESTS = (tl.constexpr(mode) for mode in range(4))
_HEADER_PAIRS = tl.constexpr(HEADER_PAIRS)
_LANES = tl.constexpr(LANES)


class Blocks(NamedTuple):
    """Blocks of a cache."""

    #: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous, at a multiple of 16 bytes.
    cache: Tensor
    #: int64 [n], contiguous, on the cache's device.
    ids: Tensor


def digest_keys(key: bytes, packed_bytes: int, device: torch.device) -> Tensor:
    """Stretches a key of 16 bytes for packed blocks of up to `packed_bytes`: int64 [num_key_pairs].

    Called once per transfer: pair i does not depend on `packed_bytes`, so the keys for whole blocks also fit slices.
    """
    assert len(key) == KEY_BYTES
    keys = torch.empty(num_key_pairs(packed_bytes), dtype=torch.int64, device=device)
    seed, nonce = (int.from_bytes(key[at : at + 8], "little", signed=True) for at in (0, 8))
    grid = (triton.cdiv(keys.shape[0], 2 * _KEYS_PER_PROGRAM),)
    _stretch_kernel[grid](keys, keys.shape[0], seed, nonce, counters=_KEYS_PER_PROGRAM, enable_fp_fusion=False)
    return keys


def pack(
    cache: Tensor, block_ids: Tensor, out: Tensor, keys: Tensor, *, layers: tuple[int, int], heads: tuple[int, int]
) -> Tensor:
    """Copies `layers` and `heads` (half-open) of each block into `out`; returns the digests, uint8 [n, 16].

    cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous; block_ids: int64 [n], in any
    order, may repeat; out: uint8 [n, packed_bytes], contiguous, each row the block's
    [layers, 2, heads, block_size, head_dim]; keys: from `digest_keys`. Cache and `out` begin at multiples of 16 bytes.
    """
    layout = SliceLayout.of(cache, layers, heads)
    _check_packed(out, block_ids, layout)
    return _move(Blocks(cache, block_ids), out, keys, layout, _PACKS, block_ids)


def unpack(
    packed: Tensor, cache: Tensor, block_ids: Tensor, keys: Tensor, *, layers: tuple[int, int], heads: tuple[int, int]
) -> Tensor:
    """The inverse of `pack`, into distinct blocks; returns the digests of what it read, for the caller to compare."""
    layout = SliceLayout.of(cache, layers, heads)
    _check_packed(packed, block_ids, layout)
    return _move(Blocks(cache, block_ids), packed, keys, layout, _UNPACKS, block_ids)


def gather(source: Blocks, target: Blocks, keys: Tensor, *, layers: tuple[int, int], heads: tuple[int, int]) -> Tensor:
    """Copies `layers` and `heads` of each block of `source` to that of `target`; returns the digests, uint8 [n, 16].

    They are those of `pack`. The caches have the same shape and dtype, and share no memory; that of the source may be
    another process's. The blocks of the target are distinct.
    """
    layout = SliceLayout.of(target.cache, layers, heads)
    assert source.cache.shape[1:] == target.cache.shape[1:]
    assert source.cache.dtype == target.cache.dtype
    assert source.ids.shape == target.ids.shape
    _check_ids(source.ids)
    assert source.cache.is_contiguous()
    assert source.cache.data_ptr() % _ALIGNMENT == 0
    return _move(target, source.cache, keys, layout, _GATHERS, source.ids)


def digest(blocks: Blocks, keys: Tensor, *, layers: tuple[int, int], heads: tuple[int, int]) -> Tensor:
    """The digests that `pack` returns, without a copy: uint8 [n, 16]."""
    layout = SliceLayout.of(blocks.cache, layers, heads)
    return _move(blocks, blocks.cache, keys, layout, _DIGESTS, blocks.ids)


def _move(
    blocks: Blocks, other: Tensor, keys: Tensor, layout: SliceLayout, mode: tl.constexpr, other_ids: Tensor
) -> Tensor:
    """`other`: packed blocks, or the cache that `other_ids` are in."""
    cache, block_ids = blocks
    _check(blocks, keys, layout)
    num_blocks = block_ids.shape[0]
    digests = torch.empty(num_blocks, DIGEST_BYTES // 4, dtype=torch.int32, device=cache.device)
    if num_blocks == 0:
        return digests.view(torch.uint8)
    group = min(_MAX_BLOCKS, num_blocks)
    words = min(_TILE_WORDS // group, triton.next_power_of_2(layout.run_words))
    is_large = num_blocks * layout.packed_words >= _ENOUGH_PROGRAMS * _TILES * _TILE_WORDS
    tiles = min(_TILES if is_large else _FEW_TILES, triton.next_power_of_2(triton.cdiv(layout.run_words, words)))
    pieces_per_run = triton.cdiv(layout.run_words, words * tiles)
    num_pieces = layout.num_runs * pieces_per_run
    sums = torch.empty(num_blocks, num_pieces, LANES, dtype=torch.int64, device=cache.device)
    _move_kernel[(triton.cdiv(num_blocks, group) * num_pieces,)](
        cache.view(-1).view(torch.int64),
        # Words, whatever is in them; a cache of another process is not to be written to.
        other.view(-1).view(torch.uint8).view(torch.int64),
        block_ids,
        other_ids,
        keys,
        sums,
        num_blocks,
        num_pieces,
        pieces_per_run,
        layout.block_words,
        layout.first_word,
        layout.run_words,
        layout.run_stride,
        layout.packed_words,
        mode=mode.value,
        group=group,
        tile_words=words,
        num_tiles=tiles,
        enable_fp_fusion=False,
    )
    _finish_kernel[(num_blocks,)](
        sums, keys, digests, num_pieces, layout.packed_bytes, at_once=32, num_warps=1, enable_fp_fusion=False
    )
    return digests.view(torch.uint8)


def _check(blocks: Blocks, keys: Tensor, layout: SliceLayout) -> None:
    _check_ids(blocks.ids)
    assert keys.dtype == torch.int64
    assert keys.is_contiguous()
    assert keys.shape[0] >= num_key_pairs(layout.packed_bytes)
    assert blocks.cache.data_ptr() % _ALIGNMENT == 0


def _check_ids(block_ids: Tensor) -> None:
    assert block_ids.dtype == torch.int64
    assert block_ids.is_contiguous()


def _check_packed(packed: Tensor, block_ids: Tensor, layout: SliceLayout) -> None:
    assert packed.dtype == torch.uint8
    assert packed.shape == (block_ids.shape[0], layout.packed_bytes)
    assert packed.is_contiguous()
    assert packed.data_ptr() % _ALIGNMENT == 0


@triton.jit(do_not_specialize=["seed", "nonce"])
def _stretch_kernel(keys, num_pairs, seed: tl.int64, nonce: tl.int64, counters: tl.constexpr):
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
def _move_kernel(
    cache,
    other,
    block_ids,
    other_ids,
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
    group: tl.constexpr,
    tile_words: tl.constexpr,
    num_tiles: tl.constexpr,
):
    """Copies a piece of one run, at most num_tiles * tile_words words, of `group` blocks, and stores its sums."""
    piece = tl.program_id(0) % num_pieces
    rows = tl.program_id(0) // num_pieces * group + tl.arange(0, group)
    is_row = rows < num_blocks
    blocks = tl.load(block_ids + rows, mask=is_row, other=0)
    run = piece // pieces_per_run
    begin = piece % pieces_per_run * (tile_words * num_tiles)
    in_cache = cache + blocks * block_words + (first_word + run * run_stride)
    if mode < _GATHERS:
        in_other = other + rows.to(tl.int64) * packed_words + run * run_words
    else:
        sources = tl.load(other_ids + rows, mask=is_row, other=0)
        in_other = other + sources * block_words + (first_word + run * run_stride)
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
        if mode == _PACKS:
            data = tl.load(cache_at, mask=mask, other=0)
            tl.store(other_at, data, mask=mask)
        else:
            data = tl.load(other_at, mask=mask, other=0)
            if mode != _DIGESTS:
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
def _finish_kernel(sums, keys, digests, num_pieces, packed_bytes, at_once: tl.constexpr):
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
