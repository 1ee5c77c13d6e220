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
_LISTS = ("extra_special_tokens", "additional_special_tokens")
#: Classes of transformers that make their steps by `add_prefix_space`, whatever tokenizer.json has.
_HEEDS_PREFIX = frozenset(("GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer"))
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
    #: Whether a space is put in front of every text; None: as tokenizer.json says.
    prefix_space: bool | None
    where: str

    @classmethod
    def from_dir(cls, model_dir: Path) -> TokenizerSettings:
        """The settings of a directory, whose files are all optional. Raises `SetupError`."""
        config = Fields.read_optional(model_dir / "tokenizer_config.json")
        has_decoder = config.has("added_tokens_decoder")
        older = Fields({}, config.where) if has_decoder else Fields.read_optional(model_dir / "special_tokens_map.json")
        # The older file has the names of tokens where both have them.
        named = {name: text for fields in (config, older) for name, text in _named(fields).items()}
        return cls(
            special_tokens={name: text for name, text in named.items() if name in SPECIAL_TOKENS},
            extra=(
                *(text for name, text in named.items() if name not in SPECIAL_TOKENS),
                *(text for fields in (config, older) for name in _LISTS for text in _listed(fields, name)),
            ),
            added=_decoder(config) if has_decoder else _older(model_dir / "added_tokens.json"),
            prefix_space=_prefix_space(config),
            where=config.where,
        )

    def applied(self, document: _Json) -> _Json:
        """A parsed tokenizer.json with these settings; the same object where they change nothing.

        Raises `SetupError` for an added token with an id that tokenizer.json gives to another one, or to none, and
        where both say something else of the space in front of texts.
        """
        if self.prefix_space is not None and self.prefix_space != _puts_space(document):
            raise SetupError(
                f"{self.where}: add_prefix_space is {str(self.prefix_space).lower()}, but tokenizer.json does the "
                "opposite. Save the tokenizer again with transformers, or remove the field."
            )
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


def token_id(document: Mapping[str, Any], text: str) -> object:
    """What a parsed tokenizer.json, which may be damaged, has as the id of a token; None: nothing."""
    listed, model = document.get("added_tokens"), document.get("model")
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and entry.get("content") == text:
            return entry.get("id")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        return vocabulary.get(text)
    pairs = enumerate(vocabulary) if isinstance(vocabulary, list) else ()
    return next((index for index, pair in pairs if isinstance(pair, list) and pair[:1] == [text]), None)


def _named(fields: Fields) -> dict[str, str]:
    """The texts of the fields that name a token, such as `eos_token`."""
    found = {name: _text_of(fields.raw(name)) for name in fields.names() if name.endswith("_token")}
    several = fields.raw("model_specific_special_tokens")
    found |= {name: _text_of(value) for name, value in several.items()} if isinstance(several, dict) else {}
    return {name: text for name, text in found.items() if text is not None}


def _listed(fields: Fields, name: str) -> list[str]:
    """The texts of the tokens in a list, or in an object by their names."""
    listed = fields.raw(name) or []
    values = [*listed.values()] if isinstance(listed, dict) else listed
    if not isinstance(values, list):
        raise fields.wrong(name, "a list of tokens")
    return [text for value in values if (text := _text_of(value)) is not None]


def _prefix_space(config: Fields) -> bool | None:
    """What transformers' class makes of `add_prefix_space`; None: it has no effect."""
    name = str(config.raw("tokenizer_class") or "").removesuffix("Fast")
    return config.flag("add_prefix_space", False) if name in _HEEDS_PREFIX and config.has("add_prefix_space") else None


def _puts_space(document: object) -> bool:
    """Whether a step of tokenizer.json puts a space, or what stands for it, in front of texts."""
    match document:
        case {"type": "ByteLevel", "add_prefix_space": bool(adds)}:
            return adds
        case {"type": "Metaspace", **settings}:
            return settings.get("prepend_scheme", "always") != "never" and settings.get("add_prefix_space") is not False
        case {"type": "Prepend"}:
            return True
        case {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer}:
            return _puts_space(normalizer) or _puts_space(pre_tokenizer)
        case {"normalizers": list(steps)} | {"pretokenizers": list(steps)}:
            return any(map(_puts_space, steps))
    return False


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
    return {index: (text, {}) for text in ids.names() for index in ids.token_ids(text)[:1]}


def _text_of(value: object) -> str | None:
    """The text of a token, which is a string or an object with the text in `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
