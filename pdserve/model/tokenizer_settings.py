"""What the files beside tokenizer.json say of its tokens: which are added, and which are special. No torch.

As transformers reads them: tokenizer_config.json, and where that lists no added tokens, the older
special_tokens_map.json and added_tokens.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.base.errors import SetupError
from pdserve.model.fields import Fields

#: Tokens that have a name.
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_FLAGS: Mapping[str, bool] = {
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": True,
    "special": False,
}
_Json = dict[str, Any]
_Added = Mapping[int, tuple[str, Mapping[str, bool]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerSettings:
    """The settings of one directory."""

    #: The texts of special tokens, by name.
    special_tokens: Mapping[str, str]
    #: Further texts that are special tokens.
    extra: tuple[str, ...]
    #: Added tokens by their ids, with the flags that the config has for them; an empty one has tokenizer.json's.
    added: _Added
    where: str

    @classmethod
    def from_dir(cls, model_dir: Path) -> TokenizerSettings:
        """The settings of a directory, whose files are all optional. Raises `SetupError`."""
        config = Fields.read_optional(model_dir / "tokenizer_config.json")
        has_decoder = config.has("added_tokens_decoder")
        names = config if has_decoder else _overridden(config, model_dir / "special_tokens_map.json")
        extra = names.raw("extra_special_tokens") or names.raw("additional_special_tokens") or []
        listed = [*extra.values()] if isinstance(extra, dict) else extra
        if not isinstance(listed, list):
            raise names.wrong("additional_special_tokens", "a list of tokens")
        found = {name: text for name in SPECIAL_TOKENS if (text := _text_of(names.raw(name))) is not None}
        return cls(
            special_tokens=found,
            extra=tuple(text for each in listed if (text := _text_of(each)) is not None),
            added=_decoder(config) if has_decoder else _older(model_dir / "added_tokens.json"),
            where=config.where,
        )

    def applied(self, document: _Json) -> _Json:
        """A parsed tokenizer.json with these settings; the same object where they change nothing.

        Raises `SetupError` for an added token with an id that tokenizer.json gives to another one, or to none.
        """
        tokens = _Tokens(document)
        for index, (text, flags) in sorted(self.added.items()):
            tokens.add(text, index, flags, self.where)
        for text in (*self.special_tokens.values(), *self.extra):
            tokens.mark_special(text)
        added = tokens.added
        return document if added == document.get("added_tokens", []) else {**document, "added_tokens": added}


class _Tokens:
    """The tokens of a tokenizer.json, of which the added ones may change."""

    def __init__(self, document: _Json) -> None:
        self._by_text: dict[str, _Json] = {each["content"]: dict(each) for each in document.get("added_tokens") or []}
        vocabulary = (document.get("model") or {}).get("vocab") or {}
        # That of a unigram model is a list of pairs.
        is_object = isinstance(vocabulary, dict)
        self._vocabulary: Mapping[str, int] = (
            vocabulary if is_object else {pair[0]: index for index, pair in enumerate(vocabulary)}
        )
        ids = [*self._vocabulary.values(), *(each["id"] for each in self._by_text.values())]
        self._next_id = max(ids, default=-1) + 1

    @property
    def added(self) -> list[_Json]:
        """The added tokens, in the order of their ids."""
        return sorted(self._by_text.values(), key=lambda each: each["id"])

    def id_of(self, text: str) -> int | None:
        """The id of a token; None: there is none."""
        return self._by_text[text]["id"] if text in self._by_text else self._vocabulary.get(text)

    def add(self, text: str, index: int, flags: Mapping[str, bool], where: str) -> None:
        """Adds a token, or sets its flags. Raises `SetupError` for an id that does not fit."""
        known = self.id_of(text)
        if known is None and index == self._next_id:
            known = index
        if known != index:
            has = "has no such token" if known is None else f"has it as {known}"
            raise SetupError(
                f"{where}: the token {text[:40]!r} has the id {index}, but tokenizer.json {has}. Save the tokenizer "
                "again with transformers."
            )
        if text in self._by_text:
            entry = self._by_text[text]
            # The tokenizers library never makes a special token an ordinary one.
            entry.update({**flags, "special": entry.get("special", False) or flags.get("special", False)})
        else:
            self._append(text, index, flags)

    def mark_special(self, text: str) -> None:
        """Makes a token of the vocabulary a special one. One that is added already is what it is, and one that does not
        exist stays text.
        """
        if text not in self._by_text and text in self._vocabulary:
            self._append(text, self._vocabulary[text], {"special": True, "normalized": False})

    def _append(self, text: str, index: int, flags: Mapping[str, bool]) -> None:
        self._by_text[text] = {"id": index, "content": text, **_FLAGS, **flags}
        self._next_id = max(self._next_id, index + 1)


def _overridden(config: Fields, path: Path) -> Fields:
    """The fields of a config with those of another file in front."""
    older = Fields.read_optional(path)
    values = {name: config.raw(name) for name in config.names()}
    return Fields(values | {name: older.raw(name) for name in older.names()}, config.where)


def _decoder(config: Fields) -> _Added:
    decoder = config.object("added_tokens_decoder")
    found: dict[int, tuple[str, Mapping[str, bool]]] = {}
    for name in decoder.names():
        entry = decoder.object(name)
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise SetupError(f"{decoder.where} has the id {name!r}, but must have token ids. Is the file damaged?")
        flags = {flag: entry.flag(flag, default) for flag, default in _FLAGS.items() if entry.has(flag)}
        found[int(name)] = entry.text("content"), flags
    return found


def _older(path: Path) -> _Added:
    ids = Fields.read_optional(path)
    return {ids.token_ids(text)[0]: (text, {}) for text in ids.names() if ids.token_ids(text)}


def _text_of(value: object) -> str | None:
    """The text of a token, which is a string or an object with the text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
