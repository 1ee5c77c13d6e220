"""The tokenizer of the simulated model, and what restricts outputs by their text: grammars, and budgets for thinking.

The product reads both: only the vocabulary is the simulation's.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from llguidance import LLMatcher

from pdserve.base.sampling import SamplingParams, ThinkingBudget
from pdserve.model.grammar import GrammarVocabulary
from pdserve.model.thinking import BoundedThinking, OutputState, ThinkingVocabulary
from pdserve.model.vocabularies import Vocabularies

VOCAB_SIZE = 64
EOS = 1
#: What may follow depends on where in it the output is, some tokens force those behind them, and some outputs are
#: complete before their length ends them.
_PATTERNS = ("([2-9]{2}Fedc)*", "([A-F][a-o]klmn)+", "([2-9][A-Z]){2,5}", "(ab|cd|[A-Z]{3})*[2-9]")
_OPENING, _CLOSING = "<", "=?>"


class Letters:
    """The tokenizer of the simulated model, as `Output` and grammars use it: a token is a letter."""

    strips_first_space = False
    is_isolated = False
    can_encode = False
    eos_token_ids = (EOS,)

    def token_bytes(self, token_id: int) -> bytes:
        """One ASCII character."""
        return bytes((48 + token_id,))

    def is_special(self, token_id: int) -> bool:
        """Only the end of text is."""
        return token_id == EOS

    def close(self) -> None:
        """Nothing is open."""


def letters(token_ids: list[int]) -> str:
    """The text of these tokens."""
    return "".join(chr(48 + token) for token in token_ids if token != EOS)


def restrictions(chance: Random) -> dict[str, Any]:
    """Fields of `SamplingParams`: a grammar or a budget for thinking for one output in five, both for some."""
    kind, pattern, max_tokens = chance.random(), chance.choice(_PATTERNS), chance.choice((0, 1, 2, 3, 5))
    if kind < 0.1:
        return {"grammar": LLMatcher.grammar_from_regex(pattern)}
    if kind < 0.18:
        return {"thinking": _budget(max_tokens, is_open=chance.random() < 0.8)}
    if kind < 0.22:
        thinking = {"thinking": _budget(max_tokens, is_open=True)}
        return thinking | {"grammar": LLMatcher.grammar_from_regex(rf"[A-Za-o]*=\?>({pattern})")}
    return {}


def _budget(max_tokens: int, *, is_open: bool) -> ThinkingBudget:
    return ThinkingBudget(
        max_tokens=max_tokens,
        is_open=is_open,
        opening=_OPENING,
        closings=(_CLOSING,),
        closing_token_ids=tuple(ord(letter) - 48 for letter in _CLOSING),
    )


def output_state(params: SamplingParams) -> OutputState | None:
    """The state of an output without tokens, read by itself and not by a worker; None: nothing restricts it."""
    read = vocabularies()
    grammar = read.grammars.compile(params.grammar) if params.grammar else None
    if params.thinking is not None:
        return BoundedThinking(params.thinking, read.thinking, grammar).start()
    return None if grammar is None else grammar.start()


@cache
def vocabularies() -> Vocabularies:
    """The vocabulary of the simulated model."""
    tokenizer: Any = Letters()
    return Vocabularies(GrammarVocabulary(tokenizer, VOCAB_SIZE), ThinkingVocabulary(tokenizer, VOCAB_SIZE))
