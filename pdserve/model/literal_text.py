"""Keeps texts of users from spelling special tokens, such as the markers of roles. No torch.

A tokenizer finds special tokens before it normalizes the rest of a text. So the first character of each of their
spellings in a user's text is replaced by a stand-in, and the first step of the normalizer puts it back. What a chat
template writes itself has no stand-ins. The token ids are those that the text would have if nothing were special.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from pdserve.base.errors import RequestError, SetupError

#: Stand-ins: Unicode keeps them for the internal use of programs.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


class LiteralText:
    """The special tokens of one tokenizer, and how texts are kept from spelling them."""

    def __init__(self, special_tokens: Sequence[str], where: str) -> None:
        """Raises `SetupError` for more kinds of special tokens than there are stand-ins."""
        self._tokens = sorted({token for token in special_tokens if token})
        firsts = sorted({token[0] for token in self._tokens})
        if len(firsts) > len(_NONCHARACTERS):
            raise SetupError(
                f"The special tokens of {where} begin with {len(firsts)} characters (limit {len(_NONCHARACTERS)}), so "
                "that texts cannot be kept from spelling them. Start without --no-special-tokens-in-text."
            )
        self._stand_ins = dict(zip(firsts, _NONCHARACTERS, strict=False))
        self._beginnings = {token[:length] for token in self._tokens for length in range(1, len(token))}
        self._longest = max(map(len, self._tokens), default=1)

    @classmethod
    def prepare(
        cls, tokenizer: Mapping[str, Any], end_ids: Sequence[int], where: str
    ) -> tuple[LiteralText, dict[str, Any]]:
        """The texts of a tokenizer, given as the JSON of its file, and the JSON of one that takes them.

        Special are tokens that the tokenizer marks so, and those that end a text. Raises `SetupError`, and what wrong
        types in the JSON raise.
        """
        added = tokenizer.get("added_tokens") or []
        is_special = [token["special"] or token["id"] in end_ids for token in added]
        literal = cls([token["content"] for token in compress(added, is_special)], where)
        steps = [
            {"type": "Replace", "pattern": {"String": stand_in}, "content": first}
            for first, stand_in in literal._stand_ins.items()
        ]
        own = tokenizer.get("normalizer")
        normalizer = {"type": "Sequence", "normalizers": [*steps, *([] if own is None else [own])]}
        # One that is found after normalizing would be found where a stand-in has been.
        added = [
            {**token, "normalized": False} if special else token
            for token, special in zip(added, is_special, strict=True)
        ]
        return literal, {**tokenizer, "added_tokens": added, "normalizer": normalizer}

    def keep(self, text: str, *, param: str) -> str:
        """The text with stand-ins; as long as before.

        A beginning of a special token at the end counts, too: what is written behind it may complete it. Raises
        `RequestError` for a text that has stand-ins already.
        """
        for stand_in in self._stand_ins.values():
            if stand_in in text:
                raise RequestError(
                    f"The text has the character U+{ord(stand_in):04X}, which is no character of texts. Remove it.",
                    param=param,
                )
        for token in self._tokens:
            # Again for spellings that overlap.
            while token in text:
                text = text.replace(token, self._stand_ins[token[0]] + token[1:])
        return self._with_safe_end(text)

    def _with_safe_end(self, text: str) -> str:
        # Templates often strip white space.
        end = len(text.rstrip())
        for start in range(max(0, end - self._longest + 1), end):
            if text[start:end] in self._beginnings:
                text = text[:start] + self._stand_ins[text[start]] + text[start + 1 :]
        return text
