"""A vocabulary in which each token is a letter, for tests of budgets for thinking; and a grammar of its tokens."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from types import SimpleNamespace
from typing import cast

import numpy as np

from pdserve.base.sampling import SamplingParams, ThinkingBudget
from pdserve.model.grammar import TokenBits
from pdserve.model.thinking import BoundedThinking, OutputGrammar, ThinkingVocabulary
from pdserve.model.tokenizer import Tokenizer

#: The letter of token 0; that of token 1 is the next one.
_FIRST = 64
#: More than any vocabulary of these tests.
_NUM_LETTERS = 63
OPENING, CLOSING = 9, (12, 13, 12)


def _letter(token: int) -> bytes:
    return bytes([_FIRST + token]) if token < _NUM_LETTERS else b""


def thinking(max_tokens: int, *, is_open: bool) -> ThinkingBudget:
    """A budget for what is between one token and three others."""
    return ThinkingBudget(
        max_tokens=max_tokens,
        is_open=is_open,
        opening=_letter(OPENING).decode(),
        closings=(b"".join(map(_letter, CLOSING)).decode(),),
        closing_token_ids=CLOSING,
    )


class FollowingGrammar:
    """Which tokens may follow depends on the last one. Both the grammar and the state of any output."""

    knows_end = False

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def start(self) -> FollowingGrammar:
        """As `Grammar.start`."""
        return self

    def can_run_ahead(self, tokens: array[int], num_prompt: int) -> bool:
        """As `GrammarState.can_run_ahead`."""
        return False

    def find(self, tokens: array[int], num_prompt: int) -> None:
        """As `GrammarState.find`."""

    def is_found(self, tokens: array[int], num_prompt: int) -> bool:
        """As `GrammarState.is_found`."""
        return True

    def forced(self, token: int) -> list[int]:
        """As `GrammarState.forced`."""
        return []

    def allowed(
        self, tokens: array[int], num_prompt: int, banned: Collection[int] = (), listed: TokenBits | None = None
    ) -> TokenBits:
        """As `GrammarState.allowed`."""
        found = np.zeros(-(-self._vocab_size // 32) * 32, bool)
        found[: self._vocab_size] = (np.arange(self._vocab_size) + tokens[-1]) % 4 != 0
        bits = np.packbits(found, bitorder="little").view(np.uint32)
        return bits if listed is None else bits & listed


#: The text that stands for such a grammar.
FOLLOWING = "following"


def bounded(params: SamplingParams, vocab_size: int = 31) -> OutputGrammar | None:
    """What a worker has of such a budget, or of the grammar `FOLLOWING`; None: there is none."""
    if params.grammar == FOLLOWING:
        return cast(OutputGrammar, FollowingGrammar(vocab_size))
    if params.thinking is None:
        return None
    tokenizer = cast(Tokenizer, SimpleNamespace(token_bytes=_letter))
    return BoundedThinking(params.thinking, ThinkingVocabulary(tokenizer, vocab_size), None)
