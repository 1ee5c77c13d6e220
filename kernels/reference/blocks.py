"""Packs slices of KV blocks densely for the wire and computes a keyed digest of each, in plain torch on any device.

The digest is a universal hash made for machines that multiply 32-bit words fast. A packed block is a row of pairs of
32-bit words (a_i, b_i), little-endian; the key is stretched into as many pairs of words (k_i, l_i) and a few more by
Philox4x32-10. Lane j of four is

    sum over i of ((a_i + k_(i+j)) mod 2^32) * ((b_i + l_(i+j)) mod 2^32), mod 2^64, plus the number of bytes

which is NH with its keys shifted by a pair from lane to lane. A multilinear hash turns each lane into 32 bits of the
digest. Sums modulo 2^64 have no order: any split of the work gives the same digest.

What it promises: with uniformly random key words, two different packed blocks of one size have equal lanes with a
probability of at most 2^-32 each, all four independently, and the last step adds as much again: at most 2^-124 for the
whole digest, whatever the corruption was, as long as it does not depend on the key. Words of Philox are not uniformly
random, but no statistical test is known to distinguish them. The digest is no MAC: it is a sum of products with the
key's words, and Philox is not made to withstand an adversary, who may solve for the key after choosing blocks. Hence
the commit's MAC over the digests (blake2b, `kvtransfer/handover/digest.py`), and a separate key for each transfer.

Source: Black, Halevi, Krawczyk, Krovetz, Rogaway, "UMAC: Fast and secure message authentication" (CRYPTO 1999), NH and
its Toeplitz construction; Lemire, Kaser, "Strongly universal string hashing is fast" (2014), multilinear.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KEY_BYTES = 16
DIGEST_BYTES = 16
LANES = 4
#: Pairs of the stretched key before the first that is used with data: three for each lane's last step, others unused.
HEADER_PAIRS = 16
#: Data is copied and hashed in words of this size.
WORD_BYTES = 8
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceLayout:
    """Location of a range of layers and heads in a block, in words of 8 bytes: `num_runs` runs at equal distances."""

    block_words: int
    first_word: int
    num_runs: int
    run_words: int
    run_stride: int

    @property
    def packed_words(self) -> int:
        """Words of one packed block."""
        return self.num_runs * self.run_words

    @property
    def packed_bytes(self) -> int:
        """Bytes of one packed block."""
        return self.packed_words * WORD_BYTES

    @classmethod
    def of(cls, cache: Tensor, layers: tuple[int, int], heads: tuple[int, int]) -> SliceLayout:
        """`layers` and `heads` are half-open ranges, not empty."""
        _, num_layers, two, num_heads, block_size, head_dim = cache.shape
        assert two == 2
        assert cache.is_contiguous()
        assert 0 <= layers[0] < layers[1] <= num_layers
        assert 0 <= heads[0] < heads[1] <= num_heads
        tile_bytes = block_size * head_dim * cache.element_size()
        assert tile_bytes % WORD_BYTES == 0, "a head of a block is not a whole number of words"
        tile = tile_bytes // WORD_BYTES
        num_runs, run_words = 2 * (layers[1] - layers[0]), (heads[1] - heads[0]) * tile
        if heads == (0, num_heads):
            # All heads: the runs are adjacent.
            num_runs, run_words = 1, num_runs * run_words
        return cls(
            block_words=num_layers * 2 * num_heads * tile,
            first_word=(layers[0] * 2 * num_heads + heads[0]) * tile,
            num_runs=num_runs,
            run_words=run_words,
            run_stride=num_heads * tile,
        )


def num_key_pairs(packed_bytes: int) -> int:
    """Number of pairs of key words for packed blocks of this size."""
    return HEADER_PAIRS + packed_bytes // WORD_BYTES + LANES - 1


def digest_keys(key: bytes, packed_bytes: int, device: torch.device) -> Tensor:
    """Stretches a key of 16 bytes for packed blocks of up to `packed_bytes`: int64 [num_key_pairs], one pair each.

    Pair i does not depend on `packed_bytes`.
    """
    count = num_key_pairs(packed_bytes)
    words = philox(key, torch.arange(-(-count // 2), device=device)).view(-1, 2)[:count]
    return words[:, 0] | words[:, 1] << 32


def philox(key: bytes, index: Tensor) -> Tensor:
    """Philox4x32-10 of int64 [n]: 32-bit words in int64 [n, 4].

    The first 8 bytes of `key` are the generator's key, the other 8 the upper half of its counter.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    assert len(key) == KEY_BYTES
    k0, k1, n0, n1 = (int.from_bytes(key[at : at + 4], "little") for at in range(0, KEY_BYTES, 4))
    c0, c1 = index & _MASK, index >> 32 & _MASK
    c2, c3 = torch.full_like(index, n0), torch.full_like(index, n1)
    for _ in range(10):
        # Products of 32-bit words wrap in int64, but both halves are correct.
        even, odd = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (odd >> 32 & _MASK) ^ c1 ^ k0, odd & _MASK, (even >> 32 & _MASK) ^ c3 ^ k1, even & _MASK
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack((c0, c1, c2, c3), 1)


def digest(packed: Tensor, keys: Tensor) -> Tensor:
    """Digests of packed blocks, uint8 [n, packed_bytes]: uint8 [n, 16]. `keys`: from `digest_keys`."""
    num_blocks, packed_bytes = packed.shape
    if num_blocks == 0:
        return packed.new_empty(0, DIGEST_BYTES)
    assert keys.shape[0] >= num_key_pairs(packed_bytes)
    data = packed.contiguous().view(torch.int64)
    low, high = data & _MASK, data >> 32 & _MASK
    sums = torch.empty(num_blocks, LANES, dtype=torch.int64, device=packed.device)
    for lane in range(LANES):
        pairs = keys[HEADER_PAIRS + lane : HEADER_PAIRS + lane + data.shape[1]]
        sums[:, lane] = (((low + (pairs & _MASK)) & _MASK) * ((high + (pairs >> 32 & _MASK)) & _MASK)).sum(1)
    return digests_of(sums, keys, packed_bytes)


def digests_of(sums: Tensor, keys: Tensor, packed_bytes: int) -> Tensor:
    """Digests from the sums of their lanes, int64 [n, 4]: uint8 [n, 16]. Of `keys`, it needs those before the data."""
    total = sums + packed_bytes
    constant, of_low, of_high = keys[: 3 * LANES].view(LANES, 3).unbind(1)
    mixed = constant + of_low * (total & _MASK) + of_high * (total >> 32 & _MASK)
    return (mixed >> 32).to(torch.int32).view(torch.uint8)


def pack(
    cache: Tensor, block_ids: Tensor, out: Tensor, keys: Tensor, *, layers: tuple[int, int], heads: tuple[int, int]
) -> Tensor:
    """Copies `layers` and `heads` (half-open) of each block into `out`; returns the digests, uint8 [n, 16].

    cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous; block_ids: int64 [n], in any
    order, may repeat; out: uint8 [n, packed_bytes], contiguous, each row the block's
    [layers, 2, heads, block_size, head_dim]; keys: from `digest_keys`.
    """
    out.copy_(_slice(cache, layers, heads)[block_ids].reshape(len(block_ids), -1).view(torch.uint8))
    return digest(out, keys)


def unpack(
    packed: Tensor, cache: Tensor, block_ids: Tensor, keys: Tensor, *, layers: tuple[int, int], heads: tuple[int, int]
) -> Tensor:
    """The inverse of `pack`, into distinct blocks; returns the digests of what it read, for the caller to compare."""
    target = _slice(cache, layers, heads)
    # As integers, since torch has no scatter of 8-bit floats.
    values = packed.view(cache.dtype).view(len(block_ids), *target.shape[1:])
    target.view(_BITS[cache.element_size()])[block_ids] = values.view(_BITS[cache.element_size()])
    return digest(packed, keys)


#: Integer dtypes by element size.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _slice(cache: Tensor, layers: tuple[int, int], heads: tuple[int, int]) -> Tensor:
    return cache[:, layers[0] : layers[1], :, heads[0] : heads[1]]
