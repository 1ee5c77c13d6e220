"""What an output may consist of: grammars over a model's tokens, with `llguidance`. No torch.

A grammar is a text in llguidance's own form, which `router_svc.api.structured` makes from what a client sends. The
state of an output is a function of the grammar and the output's tokens. So every worker finds the same state by
replaying the tokens, at about a microsecond each, and nothing but tokens has to be stored or sent.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Collection
from threading import Lock

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from pdserve.base.errors import RequestError, SetupError
from pdserve.base.sampling import MAX_FORCED
from pdserve.model.grammar_check import LIMITS, shortened
from pdserve.model.library_errors import library_errors
from pdserve.model.tokenizer import Tokenizer

#: Bits of a vocabulary: token i is bit i % 32 of word i // 32.
TokenBits = npt.NDArray[np.uint32]
#: Processor time in which it has to be found what may follow a token. Most need 10 us, the worst of real schemas 30 ms.
_MAX_FIND_S = 0.25


class GrammarFailed(Exception):
    """An output cannot go on: no token may follow, or what may takes too long to find. Its request is at fault."""


class GrammarMismatch(GrammarFailed):
    """The tokens of an output do not match its grammar: the worker that has generated them is at fault."""


class GrammarVocabulary:
    """The tokens of a model, as grammars see them. Making one takes about half a second. Immutable, thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        """`vocab_size`: that of the model's logits. Ids that the tokenizer lacks are never allowed.

        `clock`: processor time of the thread that calls it, in seconds; the default limits no time. Raises `SetupError`
        for a tokenizer with which no output could end.
        """
        self._clock = clock
        if not tokenizer.eos_token_ids:
            raise SetupError(
                "The model has no token that ends a text, without which no output with a grammar could end."
            )
        self._num_words = -(-vocab_size // 32)
        self._end_ids = frozenset(tokenizer.eos_token_ids)
        tokens = _Tokens(tokenizer, vocab_size)
        with library_errors(lambda reason: SetupError(f"Grammars cannot be read with this tokenizer: {reason}.")):
            self._tokenizer = LLTokenizer(
                TokenizerWrapper(tokens), n_vocab=vocab_size, eos_token=list(tokenizer.eos_token_ids)
            )
        tokens.by_longest_match = self._tokenizer.greedy_tokenize

    def compile(self, grammar: str) -> Grammar:
        """Reads a grammar, and finds its first tokens: a millisecond for most. Other threads run meanwhile.

        Raises `RequestError` for one that is not valid, or that takes too long.
        """
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RequestError(f"The grammar of the output is not valid: {shortened(matcher.get_error())}.")
        return Grammar(GrammarState(matcher, self._num_words, self._end_ids, self._clock))


class Grammar:
    """A grammar that was read, and what an output may begin with. Immutable, thread-safe."""

    def __init__(self, state: GrammarState) -> None:
        """`state`: that of an output without tokens. Raises `RequestError` when it takes too long to find the first."""
        self._state = state
        self._state.find(array("q"), 0)
        if failure := self._state.failure:
            raise RequestError(
                f"The grammar of the output cannot be followed: {failure}. Repeat less within repetitions."
            )

    def start(self) -> GrammarState:
        """The state of an output without tokens. Takes some microseconds."""
        return self._state.copy()


class GrammarState:
    """Follows one output. What it finds does not depend on which thread calls which method when."""

    def __init__(
        self, matcher: LLMatcher, num_words: int, end_ids: Collection[int], clock: Callable[[], float]
    ) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._clock = clock
        #: Held by the thread that finds what may follow.
        self._lock = Lock()
        #: Tokens that the matcher has consumed, those ahead included.
        self._num_tokens = 0
        #: Tokens that are forced behind those that are known.
        self._ahead: deque[int] = deque()
        #: What may follow all of these; not valid at first.
        self._bits: TokenBits = np.zeros(num_words, np.uint32)
        # Taking these takes a microsecond, which is a tenth of finding the bits.
        self._address, self._num_bytes = self._bits.ctypes.data, self._bits.nbytes
        self._has_bits = False
        #: Why nothing is known to follow the tokens ahead.
        self.failure = ""
        self._is_mismatch = False

    def copy(self) -> GrammarState:
        """A state of the same output that goes on by itself."""
        state = GrammarState(self._matcher.deep_copy(), len(self._bits), self._end_ids, self._clock)
        state._num_tokens, state._ahead = self._num_tokens, self._ahead.copy()
        state._bits[:], state._has_bits = self._bits, self._has_bits
        state.failure, state._is_mismatch = self.failure, self._is_mismatch
        return state

    @property
    def knows_end(self) -> bool:
        """Whether it decides where the output may end."""
        return True

    def can_run_ahead(self, tokens: array[int], num_prompt: int) -> bool:
        """Whether any token may follow the next one, whichever that is: never."""
        return False

    def find(self, tokens: array[int], num_prompt: int) -> None:
        """Finds what may follow the output `tokens[num_prompt:]`, so that `allowed` returns at once.

        Returns at once while another thread finds it.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._find(tokens, num_prompt)
            finally:
                self._lock.release()

    def is_found(self, tokens: array[int], num_prompt: int) -> bool:
        """Whether `allowed` would return at once."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            num_known = self._num_tokens - len(self._ahead)
            if self.failure and not self._ahead:
                return True
            return (bool(self._ahead) or self._has_bits) and num_known == len(tokens) - num_prompt
        finally:
            self._lock.release()

    def forced(self, token: int) -> list[int]:
        """Tokens that have to follow `token`, one that `allowed` gave last, as far as they have been looked for.

        None if another one could have come instead of `token`.
        """
        return list(self._ahead)[1:] if self._ahead and self._ahead[0] == token else []

    def allowed(
        self, tokens: array[int], num_prompt: int, banned: Collection[int] = (), listed: TokenBits | None = None
    ) -> TokenBits:
        """Which tokens of `listed` may follow the output `tokens[num_prompt:]`.

        `banned` may not follow either, unless nothing else may: an output that is complete has to end. `listed` None:
        any token. The result is valid until the output has another token. Raises `GrammarFailed`.
        """
        with self._lock:
            self._find(tokens, num_prompt)
            if not self._ahead and self.failure:
                raise (GrammarMismatch if self._is_mismatch else GrammarFailed)(self.failure)
            bits = self._only(self._ahead[0]) if self._ahead else self._bits
        if listed is not None:
            bits = bits & listed
            if not bits.any():
                raise GrammarFailed(f"allowed_token_ids has none of those that may be token {len(tokens) - num_prompt}")
        if banned:
            without = bits.copy()
            for token in banned:
                without[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFF_FFFF)
            if without.any():
                return without
        return bits

    def _find(self, tokens: array[int], num_prompt: int) -> None:
        new = tokens[num_prompt + self._num_tokens - len(self._ahead) :]
        while new and self._ahead and new[0] == self._ahead[0]:
            self._ahead.popleft()
            del new[0]
        if new and not self.failure:
            self._consume(new)
        if not self._ahead and not self.failure and (new or not self._has_bits):
            while self._find_bits() and len(self._ahead) < MAX_FORCED:
                pass

    def _consume(self, new: array[int]) -> None:
        """Takes in tokens of which the first is not the one that is ahead.

        Only another worker's tokens are not: one that spells what is forced in another way.
        """
        first, self._has_bits = self._num_tokens - len(self._ahead), False
        is_back = not self._ahead or self._matcher.rollback(len(self._ahead))
        self._num_tokens = first
        self._ahead.clear()
        if not is_back or not self._matcher.consume_tokens(new.tolist()):
            error = shortened(self._matcher.get_error()) or "they do not match"
            self.failure = f"tokens {first} to {first + len(new) - 1} cannot follow: {error}"
            self._is_mismatch = True
        self._num_tokens += len(new)

    def _find_bits(self) -> bool:
        """Finds what may follow all tokens, and goes ahead by the next one if that is forced. Whether it has gone."""
        matcher, last, started = self._matcher, self._num_tokens - 1, self._clock()
        matcher.unsafe_compute_mask_ptr(self._address, self._num_bytes)
        self._has_bits = True
        if matcher.is_error():
            self.failure = f"nothing is known to match behind token {last}: {shortened(matcher.get_error())}"
        elif (found_s := self._clock() - started) > _MAX_FIND_S:
            self.failure = f"it takes {found_s * 1000:.0f} ms to find what may follow token {last}"
        elif not (num_words := np.count_nonzero(self._bits)):
            self.failure = f"no token of the vocabulary may be token {last + 1}"
        elif num_words == 1 and (token := _single(self._bits)) not in self._end_ids:
            return token is not None and self._go_ahead(token)
        return False

    def _go_ahead(self, token: int) -> bool:
        if not self._matcher.consume_tokens([token]):
            error = shortened(self._matcher.get_error())
            self.failure = f"token {self._num_tokens}, the only one that may follow, does not match: {error}"
            return False
        self._ahead.append(token)
        self._num_tokens, self._has_bits = self._num_tokens + 1, False
        return True

    def _only(self, token: int) -> TokenBits:
        bits = np.zeros_like(self._bits)
        bits[token // 32] = 1 << token % 32
        return bits


def _single(bits: TokenBits) -> int | None:
    """The token of the only bit in the only word that is not 0; None: that word has more."""
    index = int(bits.argmax())
    word = int(bits[index])
    return None if word & (word - 1) else index * 32 + word.bit_length() - 1


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
