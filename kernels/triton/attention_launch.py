"""How paged attention is launched: the sizes of tiles and splits, chosen from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton

#: Programs wanted at least: two for each of the 132 multiprocessors of an H200.
_PROGRAMS = 264
#: Bits of a row in deterministic mode depend on this and on the tiles below: changing them changes outputs.
_DETERMINISTIC_SPLIT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaunch:
    """Launch parameters of one attention kernel."""

    #: Rows of a tile of scores: query rows times the query heads that share a KV head; a power of two from 16.
    block_m: int
    #: Keys of a tile of scores, a power of two from 16; tiles begin at multiples of it.
    block_n: int
    #: Keys whose softmax is computed apart and merged afterwards, a multiple of block_n. Prefill: 0 for all at once.
    split_tokens: int
    #: Splits share each context evenly instead of beginning at multiples of split_tokens. Decode only.
    even_splits: bool
    num_warps: int
    num_stages: int

    def num_splits(self, capacity_tokens: int, window: int | None) -> int:
        """Into how many parts what one row sees of a context of up to `capacity_tokens` can fall."""
        if not self.split_tokens:
            return 1
        splits = max(1, -(-capacity_tokens // self.split_tokens))
        # A window may begin anywhere in its first split.
        return splits if window is None else min(splits, (window - 2 + self.split_tokens) // self.split_tokens + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLaunches:
    """Of sequences with one row, and of those with more."""

    decode: AttentionLaunch
    prefill: AttentionLaunch


@lru_cache(maxsize=4096)
def choose_launches(
    *,
    num_sequences: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    capacity_tokens: int,
    dtype: torch.dtype,
    deterministic: bool,
) -> AttentionLaunches:
    """`capacity_tokens`: keys that a block table has room for; `dtype`: of the queries.

    In deterministic mode the number of sequences and the room in their tables play no part, and both kernels walk the
    keys in the same tiles and splits, so that a row has the same bits in both.
    """
    share = triton.next_power_of_2(num_heads // num_kv_heads)
    wide = head_dim > 128
    is_float32 = dtype == torch.float32
    # Tensor cores have no IEEE float32: its products are unrolled, and a large tile would be a large program.
    block_n = 32 if wide or is_float32 else 64
    num_stages = 2 if wide or is_float32 else 3
    if deterministic:
        # One m for both: prefill wants it larger, decode pays for rows that it does not use.
        both = AttentionLaunch(
            block_m=max(16 if is_float32 else 64, share),
            block_n=block_n,
            split_tokens=_DETERMINISTIC_SPLIT_TOKENS,
            even_splits=False,
            num_warps=8 if wide else 4,
            num_stages=num_stages,
        )
        return AttentionLaunches(decode=both, prefill=both)
    wanted = -(-_PROGRAMS // max(1, num_sequences * num_kv_heads))
    split_tokens = max(128, -(-capacity_tokens // wanted))
    decode = AttentionLaunch(
        block_m=max(16, share),
        block_n=block_n,
        split_tokens=-(-split_tokens // block_n) * block_n,
        even_splits=True,
        num_warps=8 if wide and is_float32 else 4,
        num_stages=num_stages,
    )
    prefill = AttentionLaunch(
        block_m=max(16 if is_float32 else 128, share),
        block_n=block_n,
        split_tokens=0,
        even_splits=False,
        num_warps=4 if is_float32 and not wide else 8,
        num_stages=num_stages,
    )
    return AttentionLaunches(decode=decode, prefill=prefill)
