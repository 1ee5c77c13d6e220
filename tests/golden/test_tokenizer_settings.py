"""The files beside tokenizer.json mean to us what they mean to transformers: the same tokens, and the same text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from pdserve.base.errors import SetupError
from pdserve.model.chat_template import ChatTemplate
from pdserve.model.tokenizer_file import read_tokenizer
from tests.support.lazily import transformers
from tests.unit.model.vocabularies import byte_level, sentencepiece

#: Texts with every token below, with spaces around it, and without any.
TEXTS = (
    "",
    "hello",
    " he<|end|> he </s><s> x",
    "a <tag> b",
    "한국어 two words",
    "ab <new> <more> <s>a</s>",
    "Ġw <unk>",
)
KINDS: dict[str, Callable[[], RawTokenizer]] = {"byte_level": byte_level, "sentencepiece": sentencepiece}


def _flags(content: str, **flags: bool) -> dict[str, Any]:
    all_of_them = ("lstrip", "rstrip", "normalized", "single_word", "special")
    return {"content": content, **dict.fromkeys(all_of_them, False), **flags}


def _id(kind: str, text: str) -> str:
    found = KINDS[kind]().token_to_id(text)
    assert found is not None
    return str(found)


def _next(kind: str, more: int = 0) -> int:
    return KINDS[kind]().get_vocab_size(with_added_tokens=True) + more


BYTES, PIECES = "byte_level", "sentencepiece"
#: Kind of the tokenizer, and the files.
CASES: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "no files": (BYTES, {}),
    "bos and eos": (PIECES, {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>"}}),
    "texts begin with bos": (
        PIECES,
        {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}},
    ),
    "texts end with eos": (
        PIECES,
        {
            "tokenizer_config.json": {
                "bos_token": {"__type": "AddedToken", **_flags("<s>")},
                "eos_token": {"__type": "AddedToken", **_flags("</s>")},
                "add_bos_token": True,
                "add_eos_token": True,
            }
        },
    ),
    "texts begin with nothing": (BYTES, {"tokenizer_config.json": {"bos_token": "<|end|>", "add_bos_token": False}}),
    "there is no bos to begin with": (BYTES, {"tokenizer_config.json": {"add_bos_token": True}}),
    "the older file of names": (
        PIECES,
        {
            "tokenizer_config.json": {"add_bos_token": True, "bos_token": "</s>"},
            "special_tokens_map.json": {"bos_token": _flags("<s>"), "eos_token": "</s>", "pad_token": "</s>"},
        },
    ),
    "the older file beside a newer one": (
        PIECES,
        {
            "tokenizer_config.json": {
                "add_bos_token": True,
                "bos_token": "<s>",
                "added_tokens_decoder": {"1": _flags("<s>", special=True)},
            },
            "special_tokens_map.json": {"bos_token": "</s>"},
        },
    ),
    "tokens of the older file": (
        BYTES,
        {"added_tokens.json": {"<new>": _next(BYTES), "<more>": _next(BYTES, 1), "<tag>": int(_id(BYTES, "<tag>"))}},
    ),
    "special tokens of the older files": (
        BYTES,
        {
            "added_tokens.json": {"<new>": _next(BYTES)},
            "special_tokens_map.json": {"additional_special_tokens": ["<new>"], "eos_token": "<|end|>"},
        },
    ),
    "new tokens": (
        BYTES,
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    str(_next(BYTES)): _flags("<new>", special=True),
                    str(_next(BYTES, 1)): _flags("<more>", lstrip=True),
                }
            }
        },
    ),
    "other flags of known tokens": (
        BYTES,
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    _id(BYTES, "<tag>"): _flags("<tag>", special=True, rstrip=True, lstrip=True),
                    _id(BYTES, "<|end|>"): _flags("<|end|>"),
                }
            }
        },
    ),
    "a token of the vocabulary becomes special": (
        BYTES,
        {"tokenizer_config.json": {"eos_token": "he", "additional_special_tokens": ["ll"]}},
    ),
    "a mask": (BYTES, {"tokenizer_config.json": {"mask_token": "he"}}),
    "a token of the model's own": (BYTES, {"tokenizer_config.json": {"image_token": "he"}}),
    "several tokens of the model's own": (
        BYTES,
        {"tokenizer_config.json": {"model_specific_special_tokens": {"image_token": "he"}}},
    ),
    "an empty list in the older file": (
        BYTES,
        {
            "tokenizer_config.json": {"additional_special_tokens": ["he"]},
            "special_tokens_map.json": {"additional_special_tokens": []},
        },
    ),
    "further special tokens": (
        BYTES,
        {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "ll"}, "eos_token": "<|end|>"}},
    ),
}


def _write(directory: Path, kind: str, files: dict[str, dict[str, Any]]) -> Path:
    (directory / "tokenizer.json").write_text(KINDS[kind]().to_str(), encoding="utf-8")
    (directory / "config.json").write_text("{}", encoding="utf-8")
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")
    return directory


@pytest.mark.parametrize(("kind", "files"), CASES.values(), ids=CASES)
def test_every_text_has_the_tokens_and_every_token_the_text_of_transformers(
    tmp_path: Path, kind: str, files: dict[str, dict[str, Any]]
) -> None:
    directory = _write(tmp_path, kind, files)
    ours, theirs = read_tokenizer(directory), transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        for added in (True, False):
            expected = theirs.encode(text, add_special_tokens=added)
            assert ours.encode(text, add_special_tokens=added) == expected, (text, added)
            for skipped in (True, False):
                assert ours.decode(expected, skipped) == theirs.decode(expected, skip_special_tokens=skipped), text
    assert ours.eos_token_ids == (() if theirs.eos_token is None else (theirs.convert_tokens_to_ids(theirs.eos_token),))
    named = {name: str(token) for name, token in theirs.special_tokens_map.items() if isinstance(token, str)}
    shown = ChatTemplate.from_dir(directory).special_tokens
    assert shown == {name: named[name] for name in shown}


def test_the_end_of_a_unigram_vocabulary_is_found(tmp_path: Path) -> None:
    directory = _write(tmp_path, BYTES, {"tokenizer_config.json": {"eos_token": "</s>"}})
    unigram = RawTokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0), ("</s>", -2.0)], unk_id=0))
    unigram.decoder = decoders.Metaspace()
    unigram.save(str(directory / "tokenizer.json"))
    ours, theirs = read_tokenizer(directory), transformers.PreTrainedTokenizerFast.from_pretrained(directory)
    assert ours.eos_token_ids == (theirs.eos_token_id,) == (2,)
    assert ours.is_special(2)


@pytest.mark.parametrize("name", ["GPT2Tokenizer", "Qwen2TokenizerFast", "LlamaTokenizer"])
@pytest.mark.parametrize(("kind", "has"), [(BYTES, False), (PIECES, True)])
def test_a_space_in_front_of_texts_that_the_files_do_not_agree_on_is_refused(
    tmp_path: Path, kind: str, has: bool, name: str
) -> None:
    """These classes of transformers make their steps by the field, whatever tokenizer.json has."""
    for setting in (has, None):
        config = {"tokenizer_class": name, "add_prefix_space": setting}
        read_tokenizer(_write(tmp_path, kind, {"tokenizer_config.json": config}))
    with pytest.raises(SetupError, match=r"add_prefix_space is .*, but tokenizer\.json does the opposite"):
        read_tokenizer(_write(tmp_path, kind, {"tokenizer_config.json": {**config, "add_prefix_space": not has}}))


@pytest.mark.parametrize(
    ("files", "needle"),
    [
        ({"tokenizer_config.json": {"added_tokens_decoder": {"7": _flags("<new>")}}}, r"'<new>' has the id 7.*no such"),
        ({"added_tokens.json": {"<tag>": 3}}, r"'<tag>' has the id 3, but tokenizer.json has it as"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {"x": _flags("<new>")}}}, "the id 'x'"),
        ({"tokenizer_config.json": {"additional_special_tokens": "<new>"}}, "must be a list of tokens"),
    ],
)
def test_files_that_contradict_each_other_are_refused(
    tmp_path: Path, files: dict[str, dict[str, Any]], needle: str
) -> None:
    with pytest.raises(SetupError, match=needle):
        read_tokenizer(_write(tmp_path, BYTES, files))
