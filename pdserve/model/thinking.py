"""How long an output thinks: a bound on its tokens, behind which the only ones that may follow end it. No torch.

What is thinking is found in the text, so it does not matter which tokens spell a delimiter. The state of an output is a
function of the bound and the output's tokens, as that of a grammar is, which it may have besides.
"""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Collection, Iterable

import numpy as np

from pdserve.base.sampling import ThinkingBudget
from pdserve.model.grammar import Grammar, GrammarState, TokenBits
from pdserve.model.tokenizer import Tokenizer

#: Bytes of a character that may be missing at the end of a text.
_MAX_MISSING = 3


class ThinkingVocabulary:
    """The tokens of a model, as texts with thinking need them. Making one takes some ten ms. Immutable, thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: that of the model's logits."""
        self._num_words = -(-vocab_size // 32)
        self.token_bytes = tokenizer.token_bytes
        texts = ((token, tokenizer.token_bytes(token)) for token in range(vocab_size))
        #: Tokens that may complete a character.
        self._continuations = [
            (token, text)
            for token, text in texts
            if 0 < len(text) <= _MAX_MISSING and all(0x80 <= byte < 0xC0 for byte in text)
        ]

    def only(self, tokens: Iterable[int]) -> TokenBits:
        """The bits of these tokens."""
        bits = np.zeros(self._num_words * 32, bool)
        bits[list(tokens)] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def completions(self, text: bytes) -> list[int]:
        """The tokens that go on with the character in which the text ends; none if it ends behind one."""
        start = _incomplete(text)
        return [token for token, more in self._continuations if _is_utf8(start + more)] if start else []


class BoundedThinking:
    """An output whose thinking is bounded, and that may have a grammar. Used by one thread at a time."""

    def __init__(self, budget: ThinkingBudget, vocabulary: ThinkingVocabulary, grammar: Grammar | None) -> None:
        self._budget = budget
        self._vocabulary = vocabulary
        self._grammar = grammar

    def start(self) -> ThinkingState:
        """The state of an output without tokens."""
        return ThinkingState(self._budget, self._vocabulary, None if self._grammar is None else self._grammar.start())


class ThinkingState:
    """Follows one output. Used by one thread at a time."""

    def __init__(self, budget: ThinkingBudget, vocabulary: ThinkingVocabulary, grammar: GrammarState | None) -> None:
        self._budget = budget
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._opening = budget.opening.encode()
        self._closings = [closing.encode() for closing in budget.closings]
        #: Bytes of the text's end in which a delimiter or a character may have started.
        self._kept = max(_MAX_MISSING, *(len(each) - 1 for each in (self._opening, *self._closings)))
        self._is_inside = budget.is_open
        #: No thinking can follow: a grammar has it once, at the start.
        self._is_over = False
        self._text = b""
        self._num_tokens = 0
        #: Tokens within thinking, delimiters excluded as far as tokens of their own spell their ends.
        self._num_thought = 0

    @property
    def knows_end(self) -> bool:
        """Whether a grammar decides where the output may end."""
        return self._grammar is not None

    def allowed(
        self, tokens: array[int], num_prompt: int, banned: Collection[int] = (), listed: TokenBits | None = None
    ) -> TokenBits | None:
        """As `GrammarState.allowed`; None: any token. Where a token is required, it need not be listed."""
        required = self.required(tokens, num_prompt)
        if required is not None:
            listed = required
        return listed if self._grammar is None else self._grammar.allowed(tokens, num_prompt, banned, listed)

    def find(self, tokens: array[int], num_prompt: int) -> None:
        """As `GrammarState.find`."""
        if self._grammar is not None:
            self._grammar.find(tokens, num_prompt)

    def is_found(self, tokens: array[int], num_prompt: int) -> bool:
        """As `GrammarState.is_found`."""
        return self._grammar is None or self._grammar.is_found(tokens, num_prompt)

    def forced(self, token: int) -> list[int]:
        """As `GrammarState.forced`: none, since the bound has to be looked at behind each token."""
        return []

    def required(self, tokens: array[int], num_prompt: int) -> TokenBits | None:
        """The tokens of which one has to follow the output `tokens[num_prompt:]`; None: the bound is not reached.

        A character is completed first.
        """
        self._follow(tokens, num_prompt)
        if not self._is_inside or self._num_thought < self._budget.max_tokens:
            return None
        completions = self._vocabulary.completions(self._text)
        return self._vocabulary.only(completions or [self._next_closing(tokens, num_prompt)])

    def can_run_ahead(self, tokens: array[int], num_prompt: int) -> bool:
        """Whether nothing can be required of the token after the next one, whichever the next one is."""
        if self._grammar is not None:
            return False
        self._follow(tokens, num_prompt)
        return self._budget.max_tokens - self._num_thought > 1

    def _next_closing(self, tokens: array[int], num_prompt: int) -> int:
        """What follows the longest head of the closing tokens that the output ends with."""
        closing = self._budget.closing_token_ids
        output = tuple(tokens[max(num_prompt, len(tokens) - len(closing) + 1) :])
        return closing[next(k for k in range(len(output), -1, -1) if output[len(output) - k :] == closing[:k])]

    def _follow(self, tokens: array[int], num_prompt: int) -> None:
        for token in tokens[num_prompt + self._num_tokens :]:
            self._take(self._vocabulary.token_bytes(token))
        self._num_tokens = len(tokens) - num_prompt

    def _take(self, more: bytes) -> None:
        if self._is_over:
            return
        was_inside, self._text = self._is_inside, self._text + more
        while self._passes_delimiter():
            pass
        self._num_thought += was_inside and self._is_inside
        if self._is_inside or self._grammar is None:
            self._text = self._text[-self._kept :]

    def _passes_delimiter(self) -> bool:
        """Goes behind an opening, or to a closing, which may be the start of an opening. Whether there was one."""
        text = self._text
        if self._is_inside:
            start = min((text.find(each) for each in self._closings if each in text), default=-1)
            if start < 0:
                return False
            self._is_over = self._grammar is not None
            self._text, self._is_inside = text[start:], False
            return not self._is_over
        start = text.find(self._opening)
        if self._grammar is not None and start != 0:
            self._is_over = not self._opening.startswith(text)
            return False
        if start < 0:
            return False
        self._text, self._is_inside = text[start + len(self._opening) :], True
        return True


#: What restricts an output by its text, and its state.
OutputGrammar = Grammar | BoundedThinking
OutputState = GrammarState | ThinkingState


def _incomplete(text: bytes) -> bytes:
    """The bytes of a character whose others are missing at the end of a text."""
    for length in range(1, min(_MAX_MISSING, len(text)) + 1):
        byte = text[-length]
        if byte >= 0xC0:
            return text[-length:] if length < 2 + (byte >= 0xE0) + (byte >= 0xF0) else b""
        if byte < 0x80:
            break
    return b""


def _is_utf8(text: bytes) -> bool:
    """Whether the text is valid, or the start of a valid one."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(text)
    except UnicodeDecodeError:
        return False
    return True
