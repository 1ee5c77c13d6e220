"""What an output may consist of: grammars over a model's tokens, with `llguidance`. No torch.

A grammar is a text in llguidance's own form, which `router_svc.api.structured` makes from what a client sends. The
state of an output is a function of the grammar and the output's tokens. So every worker finds the same state by
replaying the tokens, at about a microsecond each, and nothing but tokens has to be stored or sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pdserve.base.errors import RequestError, SetupError
from pdserve.model.grammar_check import LIMITS
from pdserve.model.tokenizer import Tokenizer

#: Bits of a vocabulary: token i is bit i % 32 of word i // 32.
TokenBits = npt.NDArray[np.uint32]


class GrammarFailed(Exception):
    """An output cannot go on: its tokens do not match its grammar, or what may follow takes too long to find."""


class GrammarVocabulary:
    """The tokens of a model, as grammars see them. Making one takes about half a second. Immutable, thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: that of the model's logits. Ids that the tokenizer lacks are never allowed.

        Raises `SetupError` for a tokenizer with which no output could end.
        """
        if not tokenizer.eos_token_ids:
            raise SetupError(
                "The model has no token that ends a text, without which no output with a grammar could end."
            )
        self._num_words = -(-vocab_size // 32)
        tokens = _Tokens(tokenizer, vocab_size)
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(tokens), n_vocab=vocab_size, eos_token=list(tokenizer.eos_token_ids)
        )
        tokens.by_longest_match = self._tokenizer.greedy_tokenize

    def compile(self, grammar: str) -> Grammar:
        """Reads a grammar: a millisecond for most. Raises `RequestError`. Other threads run meanwhile."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RequestError(f"The grammar of the output is not valid: {matcher.get_error()}.")
        return Grammar(matcher, self._num_words)


class Grammar:
    """A grammar that was read. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_words = num_words

    def start(self) -> GrammarState:
        """The state of an output without tokens. Takes some microseconds."""
        return GrammarState(self._matcher.deep_copy(), self._num_words)


class GrammarState:
    """Follows one output. Used by one thread at a time."""

    def __init__(self, matcher: LLMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._num_tokens = 0
        self._allowed: TokenBits = np.zeros(num_words, np.uint32)
        # Both take a microsecond, which is a tenth of a mask.
        self._address, self._bytes = self._allowed.ctypes.data, self._allowed.view(np.bool_)

    @property
    def knows_end(self) -> bool:
        """Whether it decides where the output may end."""
        return True

    def can_run_ahead(self, tokens: array[int], num_prompt: int) -> bool:
        """Whether any token may follow the next one, whichever that is: never."""
        return False

    def allowed(
        self, tokens: array[int], num_prompt: int, banned: Collection[int] = (), listed: TokenBits | None = None
    ) -> TokenBits:
        """Which tokens of `listed` may follow the output `tokens[num_prompt:]`, of which all but the last are known.

        `banned` may not follow either, unless nothing else may: an output that is complete has to end. `listed` None:
        any token. The result is valid until the next call. Raises `GrammarFailed`.
        """
        matcher, bits = self._matcher, self._allowed
        new = tokens[num_prompt + self._num_tokens :]
        if new:
            accepted = matcher.consume_tokens(new.tolist())
            if not accepted:
                raise GrammarFailed(f"tokens {self._num_tokens} to {len(tokens) - num_prompt - 1} do not match")
            self._num_tokens += len(new)
        matcher.unsafe_compute_mask_ptr(self._address, bits.nbytes)
        if matcher.is_error():
            raise GrammarFailed(f"nothing is known to match behind token {self._num_tokens - 1}: {matcher.get_error()}")
        if listed is not None:
            bits &= listed
        if not self._bytes.any():
            raise GrammarFailed(f"no token of the vocabulary may follow token {len(tokens) - num_prompt - 1}")
        if banned:
            without = bits.copy()
            for token in banned:
                without[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFF_FFFF)
            if without.any():
                bits[:] = without
        return bits


class _Tokens:
    """A vocabulary as `TokenizerWrapper` reads it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.by_longest_match: Callable[[str], list[int]] = lambda text: []
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [token for token in range(vocab_size) if tokenizer.is_special(token)]

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text that a grammar forces, as the model is used to see it, but none that is special."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        tokens = self._tokenizer.encode(text, False) if self._tokenizer.can_encode else []
        if not tokens or any(map(self._tokenizer.is_special, tokens)):
            return self.by_longest_match(text)
        return tokens
