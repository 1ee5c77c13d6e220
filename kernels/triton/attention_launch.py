"""How paged attention is launched: the sizes of tiles and splits, chosen from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
import triton

#: Target number of programs: two for each of the 132 multiprocessors of an H200.
_TARGET_PROGRAMS = 264
#: Bits of a row in deterministic mode depend on this and on the tiles below: changing them changes outputs.
_DETERMINISTIC_SPLIT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaunch:
    """Launch parameters of one attention kernel."""

    #: Rows of a tile of scores: query rows times the query heads that share a KV head; a power of two from 16.
    block_m: int
    #: Keys of a tile of scores, a power of two from 16; tiles begin at multiples of it.
    block_n: int
    #: Keys of a split, whose softmax is computed separately and merged afterwards; a multiple of block_n. Prefill: 0
    #: for no splits.
    split_tokens: int
    #: Splits divide each context evenly instead of beginning at multiples of split_tokens. Decode only.
    even_splits: bool
    num_warps: int
    num_stages: int

    def num_splits(self, capacity_tokens: int, window: int | None) -> int:
        """How many splits the visible keys of one row can touch, in a context of up to `capacity_tokens`."""
        if not self.split_tokens:
            return 1
        splits = max(1, -(-capacity_tokens // self.split_tokens))
        # A window may begin anywhere in its first split.
        return splits if window is None else min(splits, (window - 2 + self.split_tokens) // self.split_tokens + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaunches:
    """Launch parameters of both attention kernels."""

    #: Sequences with one row.
    decode: AttentionLaunch
    #: Sequences with several rows.
    prefill: AttentionLaunch


class AttentionSizes(NamedTuple):
    """The shapes that launches are chosen from. A tuple, because it is hashed for each layer of a step."""

    num_sequences: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    #: Keys that a block table has space for.
    capacity_tokens: int
    #: Queries' dtype.
    dtype: torch.dtype

    @property
    def group_size_padded(self) -> int:
        """Query heads that share a KV head, rounded up to a power of two."""
        return int(triton.next_power_of_2(self.num_heads // self.num_kv_heads))

    @property
    def is_wide(self) -> bool:
        """Whether a tile takes more than its usual registers and shared memory."""
        return self.head_dim > 128

    @property
    def is_float32(self) -> bool:
        """Tensor cores have no IEEE float32: its products are unrolled, and a large tile would be a large program."""
        return self.dtype == torch.float32

    @property
    def block_n(self) -> int:
        return 32 if self.is_wide or self.is_float32 else 64

    @property
    def num_stages(self) -> int:
        return 2 if self.is_wide or self.is_float32 else 3


@lru_cache(maxsize=4096)
def choose_launches(sizes: AttentionSizes, *, deterministic: bool, tall_tiles: bool = False) -> AttentionLaunches:
    """The launch parameters for shapes, in deterministic or fast mode.

    `tall_tiles`: deterministic prefill takes tiles of more rows than decode, on GPUs where this changes no bit.
    """
    if deterministic:
        launch = _deterministic_launch(sizes)
        return AttentionLaunches(decode=launch, prefill=_with_more_rows(launch, sizes) if tall_tiles else launch)
    return AttentionLaunches(decode=_fast_decode(sizes), prefill=_fast_prefill(sizes))


def _deterministic_launch(sizes: AttentionSizes) -> AttentionLaunch:
    """The same tiles and splits for both kernels, so that a row has the same bits in both.

    Neither the number of sequences nor the capacity of their tables matters. One matrix instruction takes 64 rows, of
    which decode uses few.
    """
    return AttentionLaunch(
        block_m=max(16 if sizes.is_float32 else 64, sizes.group_size_padded),
        block_n=sizes.block_n,
        split_tokens=_DETERMINISTIC_SPLIT_TOKENS,
        even_splits=False,
        num_warps=8 if sizes.is_wide else 4,
        num_stages=sizes.num_stages,
    )


def _with_more_rows(launch: AttentionLaunch, sizes: AttentionSizes) -> AttentionLaunch:
    """Two groups of four warps instead of one, each with 64 rows and all the keys of a tile, so that no sum changes.

    Wide heads have eight warps already, which share the keys. Float32 has no tensor cores.
    """
    if sizes.is_wide or sizes.is_float32 or launch.block_m > 64:
        return launch
    return replace(launch, block_m=128, num_warps=8)


def _fast_decode(sizes: AttentionSizes) -> AttentionLaunch:
    """As many splits as fill the GPU."""
    num_splits = -(-_TARGET_PROGRAMS // max(1, sizes.num_sequences * sizes.num_kv_heads))
    split_tokens = max(128, -(-sizes.capacity_tokens // num_splits))
    return AttentionLaunch(
        block_m=max(16, sizes.group_size_padded),
        block_n=sizes.block_n,
        split_tokens=-(-split_tokens // sizes.block_n) * sizes.block_n,
        even_splits=True,
        num_warps=8 if sizes.is_wide and sizes.is_float32 else 4,
        num_stages=sizes.num_stages,
    )


def _fast_prefill(sizes: AttentionSizes) -> AttentionLaunch:
    return AttentionLaunch(
        block_m=max(16 if sizes.is_float32 else 128, sizes.group_size_padded),
        block_n=sizes.block_n,
        split_tokens=0,
        even_splits=False,
        num_warps=4 if sizes.is_float32 and not sizes.is_wide else 8,
        num_stages=sizes.num_stages,
    )
