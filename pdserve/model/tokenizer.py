"""Text to token ids and back, with `tokenizers`. No torch, no transformers.

Decoding is defined on bytes: a text is the UTF-8 of its tokens' bytes, with U+FFFD for invalid bytes. So incremental
decoding gives the same text as decoding at once, and each increment costs no more than its own tokens.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

import tokenizers

from pdserve.model.fields import Fields
from pdserve.model.library_errors import library_errors, unsplit
from pdserve.model.literal_text import LiteralText
from pdserve.model.token_bytes import token_decoder

#: Texts are counted in pieces of this size.
_PIECE_CHARACTERS = 65_536


class IsolatedEncoder(Protocol):
    """Another process that encodes."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """As `Tokenizer.encode`."""

    def close(self) -> None:
        """Ends the process, whatever it does."""


class Tokenizer:
    """The tokenizer of one model; immutable, safe to use from several threads."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        eos_token_ids: tuple[int, ...] = (),
        where: str = "",
        literal: LiteralText | None = None,
        isolated: IsolatedEncoder | None = None,
        *,
        can_encode: bool = True,
    ) -> None:
        """`isolated` encodes in place of `tokenizer`. Raises `SetupError` when the decoder is not supported."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._literal = literal
        self._isolated = isolated
        #: Whether `encode` may be called; if not, the tokenizer only knows tokens.
        self.can_encode = can_encode
        #: Token ids that end a completion.
        self.eos_token_ids = eos_token_ids
        self._bytes_of, self._strips_first_space = token_decoder(_decoder_of(tokenizer, where))
        #: Bytes of the tokens decoded so far, which never change.
        self._token_bytes: dict[int, bytes] = {}
        self._special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    @property
    def vocab_size(self) -> int:
        """Upper bound of token ids. The vocabulary of the model itself may be padded to more."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; with `add_special_tokens` also those that the model expects around it.

        Rendered chat templates already contain their special tokens. Raises `RequestError` for a text on which the
        tokenizer gives up.
        """
        if self._isolated is not None:
            return self._isolated.encode(text, add_special_tokens)
        # A batch of one releases the interpreter's lock, unlike `encode`, and megabytes of text take seconds.
        # The fast one computes no offsets, which saves a quarter of the time. Its memory is nearly the same.
        # Its regular expressions give up after ten million steps back in one match, with a panic.
        with library_errors(unsplit):
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    @property
    def is_isolated(self) -> bool:
        """Whether another process encodes, because the time and memory of a text are not known to be bounded."""
        return self._isolated is not None

    def close(self) -> None:
        """Ends the process that encodes, if there is one."""
        if self._isolated is not None:
            self._isolated.close()

    def literal(self, text: str, *, param: str) -> str:
        """A user's text as it has to be encoded, or put into a chat template: where needed, no spelling is a token.

        Raises `RequestError` for a text that cannot be kept so.
        """
        return text if self._literal is None else self._literal.keep(text, param=param)

    def count_up_to(self, text: str, limit: int) -> int:
        """About how many tokens a text has; the count stops soon after `limit`. Takes little memory.

        Counted in pieces: each border between two pieces may add or take away some tokens.
        """
        count = 0
        for start in range(0, len(text), _PIECE_CHARACTERS):
            count += len(self.encode(text[start : start + _PIECE_CHARACTERS], False))
            if count > limit:
                break
        return count

    @cached_property
    def max_token_bytes(self) -> int:
        """Upper bound of the bytes of a token's text."""
        return max(len(token.encode()) for token in self._tokenizer.get_vocab(with_added_tokens=True))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the tokens; ids outside the vocabulary are empty."""
        stream = StreamDetokenizer(self, skip_special_tokens=skip_special_tokens)
        return stream.push(token_ids) + stream.finish()

    def token_str(self, token_id: int) -> str:
        """The text of a single token; U+FFFD for incomplete characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to the text; empty for an id outside the vocabulary."""
        data = self._token_bytes.get(token_id)
        if data is None:
            token = self._tokenizer.id_to_token(token_id)
            if token is None:
                return b""
            data = self._token_bytes[token_id] = self._bytes_of(token)
        return data

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """The ids of the tokens that are markers, by their texts."""
        return {self.token_str(token_id): token_id for token_id in sorted(self._special)}

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a marker (end of text, role) and not text."""
        return token_id in self._special

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding removes the space that SentencePiece adds in front of every text."""
        return self._strips_first_space


def _decoder_of(tokenizer: tokenizers.Tokenizer, where: str) -> Fields:
    """The decoder's fields; empty without a decoder. The whole tokenizer as JSON would be much larger."""
    decoder = tokenizer.decoder
    return Fields({"decoder": None if decoder is None else json.loads(decoder.__getstate__())}, where)


class StreamDetokenizer:
    """Incremental decoding of a growing sequence; no increment ends within a character.

    All increments and `finish()` together are `Tokenizer.decode` of all tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        *,
        kept_tokens: Collection[int] = (),
        unfinished: bytes | None = None,
    ) -> None:
        """`kept_tokens`: special tokens that are not skipped.

        `unfinished`: the tokens go on with a text that ends with these bytes of an incomplete character; None: they
        are a text of their own.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._kept_tokens = frozenset(kept_tokens)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_first_space and unfinished is None
        if unfinished:
            self._utf8.decode(unfinished)

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; bytes of an incomplete character are kept for the next call."""
        tokenizer = self._tokenizer
        data = b"".join(
            tokenizer.token_bytes(token_id)
            for token_id in token_ids
            if not self._skip_special_tokens or not tokenizer.is_special(token_id) or token_id in self._kept_tokens
        )
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        return self._utf8.decode(data)

    @property
    def unfinished(self) -> bytes:
        """The bytes of an incomplete character at the end."""
        return self._utf8.getstate()[0]

    def finish(self) -> str:
        """The rest of the text: U+FFFD when the sequence ends within a character, else nothing."""
        return self._utf8.decode(b"", final=True)
