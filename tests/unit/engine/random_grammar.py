"""Stand-ins for what restricts the tokens of a row, for tests of samplers."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import numpy as np

from pdserve.base.sampling import SamplingParams
from pdserve.engine.sequence import SampleRow
from pdserve.engine.token_rules import TokenRules
from pdserve.model.grammar import GrammarFailed, GrammarState, TokenBits


class RandomGrammar:
    """Allows random tokens at each position, and none with a `share` of 0."""

    knows_end = True

    def __init__(self, seed: int, vocab_size: int, share: float) -> None:
        self._seed, self._vocab_size, self._share = seed, vocab_size, share

    def can_run_ahead(self, tokens: array[int], num_prompt: int) -> bool:
        """As `GrammarState.can_run_ahead`."""
        return False

    def allowed(
        self, tokens: array[int], num_prompt: int, banned: Collection[int] = (), listed: TokenBits | None = None
    ) -> TokenBits:
        """As `GrammarState.allowed`."""
        if not self._share:
            raise GrammarFailed("it allows nothing")
        position = len(tokens) - num_prompt
        sampled = np.random.default_rng((self._seed, position)).random(self._vocab_size) < self._share
        sampled[[token for token in banned if token < self._vocab_size]] = False
        sampled[(self._seed + position) % self._vocab_size] = True
        padded = np.zeros(-(-self._vocab_size // 32) * 32, bool)
        padded[: self._vocab_size] = sampled
        bits = cast(TokenBits, np.packbits(padded, bitorder="little").view(np.uint32))
        return bits if listed is None else bits & listed


def with_grammar(row: SampleRow, grammar: Any) -> SampleRow:
    """The row with a grammar."""
    return replace(row, grammar=cast(GrammarState, grammar))


def with_rules(row: SampleRow, seed: int, vocab_size: int) -> SampleRow:
    """The row with half of the vocabulary, of which some tokens are bad words behind others."""
    draw = np.random.default_rng(seed)
    allowed = tuple(draw.choice(vocab_size, max(1, vocab_size // 2), replace=False).tolist())
    last = row.tokens[-1]
    words = tuple((last, token) for token in allowed[: len(allowed) // 3])
    rules = TokenRules(SamplingParams(allowed_token_ids=allowed, bad_words=words))
    return replace(row, rules=rules, listed=rules.allowed(vocab_size))
