"""Random numbers of tokens as device functions: each depends on (seed, choice, position, token id) and nothing else.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32-10.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Further than this from the double-precision noise `gumbel32` never is (its own error is below 1e-4).
GUMBEL32_MARGIN = tl.constexpr(2.0**-8)


@triton.jit
def words_of_ids(seed, choice, position, first_id, BLOCK: tl.constexpr):
    """Words of the ids `first_id .. first_id + BLOCK - 1`: uint32 [BLOCK].

    seed: int64, its 64 bits are the key; choice, position: int32; first_id: a multiple of 4, for four neighbours share
    one counter. BLOCK: a power of two, at least 8.
    """
    counters = first_id // 4 + tl.arange(0, BLOCK // 4)
    word0, word1, word2, word3 = tl.philox(seed, counters, position, choice, 0)
    return tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))


@triton.jit
def word_of_id(seed, choice, position, token_id):
    """The word of any id or block of ids (int32): uint32."""
    word0, word1, word2, word3 = tl.philox(seed, token_id // 4, position, choice, 0)
    place = token_id % 4
    return tl.where(place < 2, tl.where(place == 0, word0, word1), tl.where(place == 2, word2, word3))


@triton.jit
def gumbel64(words):
    """Standard Gumbel noise, float64: both tails are finite, and it is what is compared in the end.

    In float32 the largest words would all be rounded to 1, whose noise is infinite, and their order would be lost.
    """
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def gumbel32(words):
    """Nearly the same in float32, to find out which tokens come into question: off by less than `GUMBEL32_MARGIN`.

    Words near the upper end are measured from there, where few bits are left of the distance from 1 and the GPU's
    logarithm is of no use: -log(1 - x) as its series for small x.
    """
    uniform = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    # A rest of less than 1/32 leaves an error of x^4 / 5 to the series.
    exponential = tl.where(rest < 0.03125, series, -tl.log(tl.minimum(uniform, 0.97)))
    return -tl.log(exponential)
