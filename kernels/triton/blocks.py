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
from torch import Tensor

from kernels.reference import blocks as reference
from kernels.reference.blocks import DIGEST_BYTES, KEY_BYTES, LANES, SliceLayout, num_key_pairs
from kernels.triton.block_kernels import DIGESTS, GATHERS, PACKS, UNPACKS, finish_kernel, move_kernel, stretch_kernel

#: Words of 8 bytes that a program keeps in registers at a time: with more, too few programs fit on a processor.
_TILE_WORDS = 512
#: Tiles of a program, after which the sums of its threads are added once. Fewer if there would be too few programs.
_TILES = 16
_FEW_TILES = 4
_ENOUGH_PROGRAMS = 1024
#: Bytes from which they are not fewer.
LARGE_BYTES = _ENOUGH_PROGRAMS * _TILES * _TILE_WORDS * 8
#: Blocks of one program, which share each load of the key.
_MAX_BLOCKS = 2
_KEYS_PER_PROGRAM = 512
_ALIGNMENT = 16


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
    stretch_kernel[grid](keys, keys.shape[0], seed, nonce, counters=_KEYS_PER_PROGRAM, enable_fp_fusion=False)
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
    return _digest(_Move(Blocks(cache, block_ids), Blocks(out, block_ids), keys, layout, PACKS.value))


def unpack(
    packed: Tensor, cache: Tensor, block_ids: Tensor, keys: Tensor, *, layers: tuple[int, int], heads: tuple[int, int]
) -> Tensor:
    """The inverse of `pack`, into distinct blocks; returns the digests of what it read, for the caller to compare."""
    layout = SliceLayout.of(cache, layers, heads)
    _check_packed(packed, block_ids, layout)
    return _digest(_Move(Blocks(cache, block_ids), Blocks(packed, block_ids), keys, layout, UNPACKS.value))


def num_sums(cache: Tensor, num_blocks: int, layers: tuple[int, int]) -> int:
    """Number of the sums that `gather` and `digest` write for that many blocks."""
    return num_blocks * _Division.of(_all_heads(cache, layers), num_blocks).num_pieces * LANES


def gather(source: Blocks, target: Blocks, keys: Tensor, sums: Tensor, *, layers: tuple[int, int]) -> None:
    """Copies `layers` (half-open) of each block of `source` to that of `target`, and writes sums for their digests.

    The caches have the same shape but for the number of blocks, and the same dtype; that of the source may be another
    process's. The blocks of the target are distinct. sums: int64 [`num_sums`], contiguous, to be passed to
    `digests_of_sums`. One launch, no allocation.
    """
    assert source.cache.shape[1:] == target.cache.shape[1:]
    assert source.cache.dtype == target.cache.dtype
    assert source.ids.shape == target.ids.shape
    _check_ids(source.ids)
    assert source.cache.is_contiguous()
    assert source.cache.data_ptr() % _ALIGNMENT == 0
    _sum(_Move(target, source, keys, _all_heads(target.cache, layers), GATHERS.value), sums)


def digest(blocks: Blocks, keys: Tensor, sums: Tensor, *, layers: tuple[int, int]) -> None:
    """Writes the sums of `gather`, without a copy."""
    _sum(_Move(blocks, blocks, keys, _all_heads(blocks.cache, layers), DIGESTS.value), sums)


def digests_of_sums(sums: Tensor, num_blocks: int, keys: Tensor, packed_bytes: int) -> Tensor:
    """The digests that `pack` returns, uint8 [num_blocks, 16], in host memory as `sums` and the first of the keys."""
    # Torch would add them on all cores, and wait for those that are busy.
    together = sums.numpy().reshape(num_blocks, -1, LANES).sum(1)
    return reference.digests_of(torch.from_numpy(together), keys, packed_bytes)


class _Move(NamedTuple):
    """One launch. `other`: packed blocks with the ids of `blocks`, or blocks of another cache."""

    blocks: Blocks
    other: Blocks
    keys: Tensor
    layout: SliceLayout
    mode: int


def _sum(move: _Move, sums: Tensor) -> None:
    _check(move)
    division = _Division.of(move.layout, len(move.blocks.ids))
    assert sums.dtype == torch.int64
    assert sums.shape == (len(move.blocks.ids) * division.num_pieces * LANES,)
    _launch(move, division, sums)


def _digest(move: _Move) -> Tensor:
    _check(move)
    num_blocks, device = len(move.blocks.ids), move.blocks.cache.device
    digests = torch.empty(num_blocks, DIGEST_BYTES // 4, dtype=torch.int32, device=device)
    if num_blocks == 0:
        return digests.view(torch.uint8)
    division = _Division.of(move.layout, num_blocks)
    sums = torch.empty(num_blocks * division.num_pieces * LANES, dtype=torch.int64, device=device)
    _launch(move, division, sums)
    finish_kernel[(num_blocks,)](
        sums,
        move.keys,
        digests,
        division.num_pieces,
        move.layout.packed_bytes,
        at_once=32,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return digests.view(torch.uint8)


def _launch(move: _Move, division: _Division, sums: Tensor) -> None:
    layout, num_blocks = move.layout, len(move.blocks.ids)
    move_kernel[(triton.cdiv(num_blocks, division.group) * division.num_pieces,)](
        move.blocks.cache.view(-1).view(torch.int64),
        # Words, whatever is in them; a cache of another process is not to be written to.
        move.other.cache.view(-1).view(torch.uint8).view(torch.int64),
        move.blocks.ids,
        move.other.ids,
        move.keys,
        sums,
        num_blocks,
        division.num_pieces,
        division.pieces_per_run,
        layout.block_words,
        layout.first_word,
        layout.run_words,
        layout.run_stride,
        layout.packed_words,
        mode=move.mode,
        group=division.group,
        tile_words=division.tile_words,
        num_tiles=division.num_tiles,
        enable_fp_fusion=False,
    )


class _Division(NamedTuple):
    """How blocks are divided among programs."""

    #: Blocks of one program.
    group: int
    tile_words: int
    num_tiles: int
    pieces_per_run: int
    #: Pieces of one block.
    num_pieces: int

    @classmethod
    def of(cls, layout: SliceLayout, num_blocks: int) -> _Division:
        group = min(_MAX_BLOCKS, num_blocks)
        words = min(_TILE_WORDS // group, triton.next_power_of_2(layout.run_words))
        is_large = num_blocks * layout.packed_words >= _ENOUGH_PROGRAMS * _TILES * _TILE_WORDS
        tiles = min(_TILES if is_large else _FEW_TILES, triton.next_power_of_2(triton.cdiv(layout.run_words, words)))
        pieces_per_run = triton.cdiv(layout.run_words, words * tiles)
        return cls(group, words, tiles, pieces_per_run, layout.num_runs * pieces_per_run)


def _all_heads(cache: Tensor, layers: tuple[int, int]) -> SliceLayout:
    return SliceLayout.of(cache, layers, (0, cache.shape[3]))


def _check(move: _Move) -> None:
    _check_ids(move.blocks.ids)
    assert move.keys.dtype == torch.int64
    assert move.keys.is_contiguous()
    assert move.keys.shape[0] >= num_key_pairs(move.layout.packed_bytes)
    assert move.blocks.cache.data_ptr() % _ALIGNMENT == 0


def _check_ids(block_ids: Tensor) -> None:
    assert block_ids.dtype == torch.int64
    assert block_ids.is_contiguous()


def _check_packed(packed: Tensor, block_ids: Tensor, layout: SliceLayout) -> None:
    assert packed.dtype == torch.uint8
    assert packed.shape == (block_ids.shape[0], layout.packed_bytes)
    assert packed.is_contiguous()
    assert packed.data_ptr() % _ALIGNMENT == 0
