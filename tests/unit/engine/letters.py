"""A vocabulary in which each token is a letter, for tests of budgets for thinking."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from pdserve.base.sampling import SamplingParams, ThinkingBudget
from pdserve.model.thinking import BoundedThinking, ThinkingVocabulary
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


def bounded(params: SamplingParams, vocab_size: int = 31) -> BoundedThinking | None:
    """What a worker has of such a budget; None: there is none."""
    if params.thinking is None:
        return None
    tokenizer = cast(Tokenizer, SimpleNamespace(token_bytes=_letter))
    return BoundedThinking(params.thinking, ThinkingVocabulary(tokenizer, vocab_size), None)
