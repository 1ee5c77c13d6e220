"""Counter-based random numbers: each is a pure function of (seed, choice, position, token id), on any device.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), Philox4x32-10.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
#: One counter yields this many 32-bit words.
WORDS = 4


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """The four output words of Philox4x32-10. All are int64 tensors that broadcast, holding unsigned 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_index in range(_ROUNDS):
        # A product wraps as a signed number, but its 64 bits are those of the unsigned product. Masking after the
        # exclusive-or rids all of its operands of their upper halves at once; lower halves may carry rubbish above.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        round_k0 = (k0 + round_index * _KEY_STEPS[0]) & _MASK
        round_k1 = (k1 + round_index * _KEY_STEPS[1]) & _MASK
        c0 = (product1 >> 32).bitwise_xor(c1).bitwise_xor_(round_k0).bitwise_and_(_MASK)
        c2 = (product0 >> 32).bitwise_xor(c3).bitwise_xor_(round_k1).bitwise_and_(_MASK)
        c1, c3 = product1, product0
    return c0, c1 & _MASK, c2, c3 & _MASK


class GumbelNoise:
    """Gumbel noise of some rows: element (row, token id) depends on that row's key and that id alone."""

    def __init__(self, keys: list[tuple[int, int, int]], device: torch.device) -> None:
        """`keys`: (seed, choice index, position) of each row; the seed's 64 bits are the key of the generator."""

        def column(words: list[int]) -> Tensor:
            return torch.tensor(words, dtype=torch.int64, device=device).unsqueeze(1)

        self._key = (
            column([seed & _MASK for seed, _, _ in keys]),
            column([(seed >> 32) & _MASK for seed, _, _ in keys]),
        )
        self._position = column([position & _MASK for _, _, position in keys])
        self._choice = column([choice & _MASK for _, choice, _ in keys])
        self._device = device

    def of_vocabulary(self, vocab_size: int) -> Tensor:
        """Noise of ids `0 .. vocab_size-1`: float64 [num_rows, vocab_size]."""
        counters = torch.arange(-(-vocab_size // WORDS), device=self._device).unsqueeze(0)
        words = torch.stack(self._words(counters), dim=2)
        return _gumbel(words.flatten(1)[:, :vocab_size])

    def of_tokens(self, token_ids: Tensor) -> Tensor:
        """Noise of `token_ids`, int64 [num_rows, n]: float64 [num_rows, n]."""
        words = torch.stack(self._words(token_ids // WORDS), dim=2)
        return _gumbel(words.gather(2, (token_ids % WORDS).unsqueeze(2)).squeeze(2))

    def _words(self, counters: Tensor) -> tuple[Tensor, ...]:
        no_word = torch.zeros_like(self._choice)
        return philox4x32((counters, self._position, self._choice, no_word), self._key)


def _gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise from 32-bit words; double precision keeps both tails finite."""
    uniform = words.to(torch.float64).add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()
