"""Device functions for the random numbers of tokens, which depend on (seed, choice, position, token id) alone.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32-10.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Bound of the difference between `gumbel32` and `gumbel64` (the actual error is below 1e-4).
GUMBEL32_MARGIN = tl.constexpr(2.0**-8)


@triton.jit
def words_of_ids(seed, choice, position, first_id, BLOCK: tl.constexpr):
    """Random words of the ids `first_id .. first_id + BLOCK - 1`: uint32 [BLOCK].

    seed: int64, whose 64 bits are the key; choice, position: int32; first_id: a multiple of 4, since four adjacent ids
    share one counter. BLOCK: a power of two, at least 8.
    """
    counters = first_id // 4 + tl.arange(0, BLOCK // 4)
    word0, word1, word2, word3 = tl.philox(seed, counters, position, choice, 0)
    return tl.interleave(tl.interleave(word0, word2), tl.interleave(word1, word3))


@triton.jit
def word_of_id(seed, choice, position, token_id):
    """The random word of any id or block of ids (int32): uint32."""
    word0, word1, word2, word3 = tl.philox(seed, token_id // 4, position, choice, 0)
    index = token_id % 4
    return tl.where(index < 2, tl.where(index == 0, word0, word1), tl.where(index == 2, word2, word3))


@triton.jit
def gumbel64(words):
    """Standard Gumbel noise in float64, which decides; both tails are finite.

    In float32 the largest words would all be rounded to 1, whose noise is infinite, and their order would be lost.
    """
    uniform = (words.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -tl.log(-tl.log(uniform))


@triton.jit
def gumbel32(words):
    """An approximation in float32, to find the tokens that may win; the error is below `GUMBEL32_MARGIN`.

    Near the upper end few bits are left of the distance from 1, and the GPU's logarithm is too inaccurate. There the
    distance itself is used, with the series of -log(1 - x) for small x.
    """
    uniform = (words.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))
    # Below 1/32, the series' relative error is x^4 / 5.
    exponential = tl.where(rest < 0.03125, series, -tl.log(tl.minimum(uniform, 0.97)))
    return -tl.log(exponential)
