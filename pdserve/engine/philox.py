"""Counter-based random numbers: each is a pure function of (seed, choice, position, token id).

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32-10.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from pdserve.engine import elementary

Words = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]

_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
#: Sums that the rounds add to the two words of the key.
_KEY_STEPS = np.arange(10, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
#: 32-bit words per counter.
WORDS = 4

#: Bounds of the Gumbel noise: that of the smallest and of the largest word.
MIN_GUMBEL = -math.log(-math.log(0.5 * 2.0**-32))
MAX_GUMBEL = -math.log(-math.log1p(-0.5 * 2.0**-32))


def philox4x32(even: Words, odd: Words, key: Words) -> tuple[Words, Words]:
    """Philox4x32-10 of n counters: the output words 0 and 2, and 1 and 3, each [2, n], unsigned 32-bit in 64.

    even: [2, n], words 0 and 2 of the counters; odd: [2, n], words 1 and 3; key: [2, 1]. All hold 32-bit words.
    """
    keys = (key + _KEY_STEPS) & _MASK
    even = even.copy()
    buffers = np.empty_like(even), np.empty_like(even)
    for index, round_key in enumerate(keys):
        # Each product goes to the other row: its upper half into an even word, its lower half into an odd one. The
        # upper halves of odd words are undefined until they are masked after the exclusive-or.
        products = np.multiply(even, _MULTIPLIERS, out=buffers[index % 2])[::-1]
        np.right_shift(products, _HALF, out=even)
        even ^= odd
        even ^= round_key
        even &= _MASK
        odd = products
    return even, odd & _MASK


class GumbelNoise:
    """Noise of one choice at one position. A token's noise depends on seed, choice, position and token id alone."""

    def __init__(self, seed: int, choice_index: int, position: int) -> None:
        """The 64 bits of `seed` are the generator's key."""
        self._key = np.array([[seed & 0xFFFFFFFF], [(seed >> 32) & 0xFFFFFFFF]], np.uint64)
        self._choice = choice_index
        self._position = position

    def words_of_vocabulary(self, vocab_size: int) -> npt.NDArray[np.uint32]:
        """The random words of token ids `0 .. vocab_size-1`: [vocab_size]."""
        even, odd = self._words(np.arange(-(-vocab_size // WORDS), dtype=np.uint64))
        words = np.empty((even.shape[1], WORDS), np.uint32)
        words[:, 0::2] = even.T
        words[:, 1::2] = odd.T
        return words.reshape(-1)[:vocab_size]

    def of_tokens(self, token_ids: npt.NDArray[np.int64]) -> Floats:
        """Noise of `token_ids`: [n]."""
        return gumbel(self.words_of(token_ids))

    def words_of(self, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32] | Words:
        """The random words of `token_ids`: [n]."""
        if len(token_ids) > token_ids.max(initial=0) // WORDS:  # Then all ids up to the largest need fewer counters.
            return self.words_of_vocabulary(int(token_ids.max(initial=0)) + 1)[token_ids]
        counters, word_indices = np.divmod(token_ids, WORDS)
        even, odd = self._words(counters.astype(np.uint64))
        words: Words = np.choose(word_indices, (even[0], odd[0], even[1], odd[1]))
        return words

    def _words(self, counters: Words) -> tuple[Words, Words]:
        even = np.empty((2, len(counters)), np.uint64)
        even[0], even[1] = counters, self._choice
        odd = np.zeros_like(even)
        odd[0] = self._position
        return philox4x32(even, odd, self._key)


def gumbel(words: npt.NDArray[np.uint32] | Words) -> Floats:
    """Standard Gumbel noise of 32-bit words; double precision keeps both tails finite."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    noise: Floats = -np.log(-np.log(uniform))
    return noise


def exact_gumbel(words: npt.NDArray[np.uint32] | Words) -> Floats:
    """As `gumbel`, with the same bits on every processor."""
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    return -elementary.log(-elementary.log(uniform))


def min_word(noise: float) -> int:
    """A lower bound of the words with more than this noise; some words from the bound on may have less."""
    return max(0, int(math.exp(-math.exp(-noise)) * 2.0**32 * (1 - 1e-9)) - 1)
