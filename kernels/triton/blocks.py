"""Packs slices of KV blocks densely for the wire, unpacks them, or copies them from and to other memory.

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
from kernels.triton.block_kernels import DIGESTS, READS, WRITES, finish_kernel, move_kernel, stretch_kernel

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


class Slices(NamedTuple):
    """Slices of blocks in memory that the cache's device reaches, such as another process's cache."""

    #: uint8 [num_bytes], contiguous, at a multiple of 16 bytes.
    memory: Tensor
    #: int64 [n], contiguous, on the cache's device: words of 8 bytes in front of each slice, even numbers.
    words: Tensor


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
    return _digest(_Move(Blocks(cache, block_ids), Slices(out, block_ids), keys, layout, WRITES.value, is_packed=True))


def unpack(
    packed: Tensor, cache: Tensor, block_ids: Tensor, keys: Tensor, *, layers: tuple[int, int], heads: tuple[int, int]
) -> Tensor:
    """The inverse of `pack`, into distinct blocks; returns the digests of what it read, for the caller to compare."""
    layout = SliceLayout.of(cache, layers, heads)
    _check_packed(packed, block_ids, layout)
    return _digest(
        _Move(Blocks(cache, block_ids), Slices(packed, block_ids), keys, layout, READS.value, is_packed=True)
    )


def num_sums(cache: Tensor, num_blocks: int, layers: tuple[int, int]) -> int:
    """Number of the sums that `gather`, `scatter` and `digest` write for that many blocks."""
    return num_blocks * _Division.of(_all_heads(cache, layers), num_blocks).num_pieces * LANES


def gather(source: Slices, target: Blocks, keys: Tensor, sums: Tensor, *, layers: tuple[int, int]) -> None:
    """Copies slices with `layers` (half-open) and all heads to the blocks, and writes sums for their digests.

    The blocks are distinct. The slices are within the memory, which may be another process's. sums: int64 [`num_sums`],
    contiguous, to be passed to `digests_of_sums`. One launch, no allocation.
    """
    _sum(_Move(target, source, keys, _all_heads(target.cache, layers), READS.value), sums)


def scatter(source: Blocks, target: Slices, keys: Tensor, sums: Tensor, *, layers: tuple[int, int]) -> None:
    """The inverse of `gather`, to slices that do not overlap."""
    _sum(_Move(source, target, keys, _all_heads(source.cache, layers), WRITES.value), sums)


def digest(blocks: Blocks, keys: Tensor, sums: Tensor, *, layers: tuple[int, int]) -> None:
    """Writes the sums of `gather`, without a copy."""
    _sum(_Move(blocks, Slices(*blocks), keys, _all_heads(blocks.cache, layers), DIGESTS.value), sums)


def digests_of_sums(sums: Tensor, num_blocks: int, keys: Tensor, packed_bytes: int) -> Tensor:
    """The digests that `pack` returns, uint8 [num_blocks, 16], in host memory as `sums` and the first of the keys."""
    # Torch would add them on all cores, and wait for those that are busy.
    together = sums.numpy().reshape(num_blocks, -1, LANES).sum(1)
    return reference.digests_of(torch.from_numpy(together), keys, packed_bytes)


class _Move(NamedTuple):
    """One launch. `other`: if `is_packed`, packed blocks, one behind the other."""

    blocks: Blocks
    other: Slices
    keys: Tensor
    layout: SliceLayout
    mode: int
    is_packed: bool = False


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
        move.other.memory.view(-1).view(torch.uint8).view(torch.int64),
        move.blocks.ids,
        move.other.words,
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
        is_packed=move.is_packed,
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
    for indices in (move.blocks.ids, move.other.words):
        assert indices.dtype == torch.int64
        assert indices.is_contiguous()
        assert indices.shape == move.blocks.ids.shape
    assert move.keys.dtype == torch.int64
    assert move.keys.is_contiguous()
    assert move.keys.shape[0] >= num_key_pairs(move.layout.packed_bytes)
    for memory in (move.blocks.cache, move.other.memory):
        assert memory.is_contiguous()
        assert memory.data_ptr() % _ALIGNMENT == 0


def _check_packed(packed: Tensor, block_ids: Tensor, layout: SliceLayout) -> None:
    assert packed.dtype == torch.uint8
    assert packed.shape == (block_ids.shape[0], layout.packed_bytes)
