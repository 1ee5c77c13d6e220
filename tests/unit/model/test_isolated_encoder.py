"""Tokenizers of hostile files: a text that takes too much ends with an error of its request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers

from pdserve.base.errors import RequestError, SetupError
from pdserve.model.isolated_encoder import EncoderProcess
from pdserve.model.tokenizer_file import read_tokenizer
from tests.unit.model.vocabularies import byte_level

#: Each match gives up before the limit of steps back; there are many.
_SLOW_PATTERN = "(a|aa)+[bc]|."
_MEMORY_BYTES = 384 << 20
_SLOW_TEXT = ("a" * 26 + " ") * 300


def _with_pattern(pattern: str) -> tokenizers.Tokenizer:
    raw = byte_level()
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return raw


def _growing() -> dict[str, Any]:
    """The JSON of a tokenizer whose normalizer makes a billion characters of one."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    return {**json.loads(byte_level().to_str()), "normalizer": {"type": "Sequence", "normalizers": [step] * 3}}


@pytest.fixture
def slow() -> Iterator[EncoderProcess]:
    with closing(EncoderProcess(_with_pattern(_SLOW_PATTERN).to_str(), "test", least_s=0.05)) as encoder:
        yield encoder


def test_a_regular_expression_that_is_not_known_runs_in_another_process_with_the_same_tokens(tmp_path: Path) -> None:
    raw = _with_pattern(r"\w+|.")
    raw.save(str(tmp_path / "tokenizer.json"))
    with closing(read_tokenizer(tmp_path)) as tokenizer:
        assert tokenizer.is_isolated
        for text in ("hello world <|end|>", "", "\N{SNOWMAN}\n"):
            assert tokenizer.encode(text) == raw.encode(text).ids
        with pytest.raises(RequestError, match="fails on this text"):
            tokenizer.encode("\ud800")


def test_a_text_that_takes_too_much_time_is_refused_and_later_ones_are_encoded(slow: EncoderProcess) -> None:
    short = slow.encode("ab", False)
    with pytest.raises(RequestError, match="needs too much"):
        slow.encode(_SLOW_TEXT, False)
    assert slow.encode("ab", False) == short == _with_pattern(_SLOW_PATTERN).encode("ab", add_special_tokens=False).ids


def test_a_text_that_takes_too_much_memory_is_refused() -> None:
    document = _growing()
    document["added_tokens"] = []
    with closing(EncoderProcess(json.dumps(document), "test", least_s=5.0, max_memory_bytes=_MEMORY_BYTES)) as encoder:
        assert encoder.encode("b", False)
        with pytest.raises(RequestError, match=f"{_MEMORY_BYTES} bytes"):
            encoder.encode("a" * 100, False)


def test_a_file_whose_own_tokens_take_too_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a tokenizer normalizes those of its tokens that are found after normalizing."""
    monkeypatch.setattr(
        "pdserve.model.tokenizer_file.EncoderProcess", partial(EncoderProcess, max_memory_bytes=_MEMORY_BYTES)
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(_growing()))
    with pytest.raises(SetupError, match=f"{_MEMORY_BYTES} bytes"):
        read_tokenizer(tmp_path)


def test_a_file_that_is_no_tokenizer_is_refused_by_the_other_process(tmp_path: Path) -> None:
    document = {**_growing(), "normalizer": {"type": "Nothing"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(SetupError, match=r"tokenizer.json is not a valid tokenizer: data did not match"):
        read_tokenizer(tmp_path)
