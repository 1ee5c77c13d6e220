"""Which tokenizers encode any text in bounded time and memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors

from pdserve.model.fetch.gguf_tokenizer import _DIGITS_THEN_GPT2, _GPT2, _SPLIT_DIGITS, _pre_tokenizer
from pdserve.model.tokenizer_cost import KNOWN_PATTERNS, unbounded_step
from tests.unit.model.vocabularies import byte_level, sentencepiece


def _made(**fields: Any) -> dict[str, Any]:
    """The JSON of a tokenizer with these fields. None of it is run."""
    states = {name: json.loads(field.__getstate__()) for name, field in fields.items()}
    return {**json.loads(byte_level().to_str()), **states}


@pytest.mark.parametrize("name", [*_GPT2, *_DIGITS_THEN_GPT2, *_SPLIT_DIGITS])
def test_the_tokenizers_of_gguf_files_are_bounded(name: str) -> None:
    assert unbounded_step(_made(pre_tokenizer=_pre_tokenizer(name, "test"), normalizer=normalizers.NFC())) is None


def test_usual_tokenizers_are_bounded() -> None:
    assert unbounded_step(json.loads(sentencepiece().to_str())) is None
    old = _made()
    del old["model"]["type"]
    assert unbounded_step(old) is None
    decomposed = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("``", '"')])
    assert unbounded_step(_made(normalizer=decomposed)) is None


@pytest.mark.parametrize("pattern", sorted(KNOWN_PATTERNS))
def test_a_known_pattern_is_a_regular_expression_and_bounded(pattern: str) -> None:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    assert unbounded_step(_made(pre_tokenizer=pre_tokenizers.Sequence([split, split]))) is None
    assert split.pre_tokenize_str("a 1")


_GROWING = normalizers.Replace("a", "aa")
_NESTED = normalizers.Sequence([normalizers.Sequence([_GROWING] * 4), _GROWING, _GROWING, _GROWING])


@pytest.mark.parametrize(
    ("step", "fields"),
    [
        ("Split", {"pre_tokenizer": pre_tokenizers.Split(Regex("(a|aa)+b"), "isolated")}),
        ("Split", {"pre_tokenizer": pre_tokenizers.Split("", "isolated")}),
        ("Replace", {"normalizer": normalizers.Replace(Regex("(a|aa)+b"), "b")}),
        ("Replace after 0 steps", {"normalizer": normalizers.Replace("a", "a" * 1000)}),
        ("Replace", {"normalizer": normalizers.Replace("", "a")}),
        (
            "Replace after 6 steps",
            {"normalizer": normalizers.Sequence([_GROWING, normalizers.Sequence([_GROWING] * 9)])},
        ),
        ("ByteLevel after 3 steps", {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.ByteLevel()] * 4)}),
        ("Prepend", {"normalizer": normalizers.Prepend("a" * 1000)}),
        ("Strip after 128 steps", {"normalizer": normalizers.Sequence([normalizers.Strip()] * 129)}),
        ("BPE", {"model": models.BPE(vocab={}, merges=[], end_of_word_suffix="a" * 1000)}),
        ("Unigram", {"model": models.Unigram([("a" * 1000, 0.0)], unk_id=0)}),
        ("WordPiece", {"model": models.WordPiece({"a": 0}, unk_token="a", max_input_chars_per_word=10**9)}),
        (
            "post_processor",
            {"post_processor": processors.TemplateProcessing("$A" + " a" * 5000, "$A $B", [("a", 1)])},
        ),
    ],
)
def test_a_step_that_may_take_any_time_or_memory_is_named(step: str, fields: dict[str, Any]) -> None:
    assert unbounded_step(_made(**fields)) == step
