"""Which tokens a request allows (`allowed_token_ids`) and forbids (`bad_words`), whatever their logits are.

What is forbidden follows from the output's tokens alone. So a worker that goes on with an output needs nothing else.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection

import numpy as np

from pdserve.base.sampling import SamplingParams
from pdserve.model.grammar import TokenBits


def only(token_id: int, vocab_size: int) -> TokenBits:
    """The bits with which one token alone is allowed."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    words[token_id // 32] = 1 << token_id % 32
    return words


class TokenRules:
    """The rules of one request, which its choices share. Used by one thread at a time."""

    def __init__(self, params: SamplingParams) -> None:
        self._allowed_ids = params.allowed_token_ids
        self._allowed: TokenBits | None = None
        self._always = frozenset(word[0] for word in params.bad_words if len(word) == 1)
        #: Longer bad words, by the token before the last: few of them can end with the next token.
        self._words: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in params.bad_words:
            if len(word) > 1:
                self._words[word[-2]].append(word)

    @classmethod
    def of(cls, params: SamplingParams) -> TokenRules | None:
        """The rules of a request; None: it has none."""
        return cls(params) if params.allowed_token_ids or params.bad_words else None

    @property
    def follow_output(self) -> bool:
        """Whether what is forbidden depends on the output so far."""
        return bool(self._words)

    def allowed(self, vocab_size: int, ends: Collection[int] = ()) -> TokenBits | None:
        """The bits of `allowed_token_ids` and of `ends`, always the same; None: all tokens are allowed."""
        if self._allowed_ids and self._allowed is None:
            bits = np.zeros(-(-vocab_size // 32) * 32, bool)
            bits[[*self._allowed_ids, *ends]] = True
            self._allowed = np.packbits(bits, bitorder="little").view(np.uint32)
        return self._allowed

    def forbidden(self, tokens: array[int], num_prompt: int) -> Collection[int]:
        """Ids that would complete one of the bad words behind the output `tokens[num_prompt:]`."""
        words = self._words.get(tokens[-1]) if len(tokens) > num_prompt else None
        if not words:
            return self._always
        output = tokens[max(num_prompt, len(tokens) - max(map(len, words))) :].tolist()
        return self._always.union(word[-1] for word in words if tuple(output[1 - len(word) :]) == word[:-1])
