"""Tokenizers from GGUF vocabularies: SentencePiece by scores, byte-level by merges. Damaged ones are refused."""

from __future__ import annotations

import pytest

from pdserve.base.errors import SetupError
from pdserve.model.fetch.gguf_tokenizer import build_tokenizer
from pdserve.model.fields import Fields
from pdserve.model.tokenizer import Tokenizer

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_PIECES = {"▁": -9.0, "a": -8.0, "b": -7.5, "c": -7.4, "ab": -1.0, "bc": -0.5, "▁a": -3.0, "▁ab": -2.0}


def sentencepiece(**changes: object) -> Fields:
    tokens = ["<unk>", "<s>", "</s>", *_BYTES, *_PIECES, "<user>"]
    values: dict[str, object] = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [*_PIECES.values(), 0.0],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(_PIECES) + [4],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return Fields(values | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}, "x.gguf")


def byte_level(pre: str, **changes: object) -> Fields:
    values: dict[str, object] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [
            "<s>",
            "1",
            "2",
            "3",
            "4",
            "a",
            "Ġ",
            "12",
            "123",
            "Ġa",
            "aa",
            "e",
            "Ì",
            "ģ",
            "Ã",
            "©",
        ],
        "tokenizer.ggml.token_type": [3] + [1] * 15,
        "tokenizer.ggml.merges": ["1 2", "12 3", "Ġ a", "a a"],
        "tokenizer.ggml.bos_token_id": 0,
    }
    return Fields(values | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}, "x.gguf")


def test_sentencepiece_merges_the_best_scored_pair_first() -> None:
    tokenizer = build_tokenizer(sentencepiece())
    # "bc" scores better than "ab", so it is merged first although "ab" comes first in the text.
    assert tokenizer.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab"]


def test_sentencepiece_falls_back_to_bytes_and_decodes_them() -> None:
    tokenizer = build_tokenizer(sentencepiece())
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    ours = Tokenizer(tokenizer)
    for text in ("ab 한 é", "a  b", "ab<user>"):
        assert ours.decode(ours.encode(text)) == text


def test_a_space_is_added_in_front_only_if_the_file_says_so() -> None:
    tokenizer = Tokenizer(build_tokenizer(sentencepiece(add_space_prefix=False)))
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        ("gpt-2", ["123", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("qwen2", ["1", "2", "3", "4"]),
        ("llama-bpe", ["<s>", "123", "4"]),
    ],
)
def test_digits_are_split_as_the_pre_tokenizer_says(pre: str, tokens: list[str]) -> None:
    assert build_tokenizer(byte_level(pre)).encode("1234").tokens == tokens


def test_qwen2_composes_characters_first() -> None:
    assert build_tokenizer(byte_level("qwen2")).encode("e\u0301").tokens == ["Ã", "©"]
    assert build_tokenizer(byte_level("gpt-2")).encode("e\u0301").tokens == ["e", "Ì", "ģ"]


@pytest.mark.parametrize(("flag", "tokens"), [(True, ["<s>", "a"]), (False, ["a"])])
def test_the_file_decides_whether_there_is_a_first_token(flag: bool, tokens: list[str]) -> None:
    assert build_tokenizer(byte_level("llama-bpe", add_bos_token=flag)).encode("a").tokens == tokens


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (sentencepiece(model="wordpiece"), "tokenizer 'wordpiece' is not supported; supported: gpt2, llama"),
        (byte_level("gpt-5"), "pre-tokenizer 'gpt-5' is not supported"),
        (byte_level("gpt-2", merges=["1 9"]), "merges do not match"),
        (byte_level("gpt-2", merges=["12"]), "merges do not match"),
        (byte_level("gpt-2", token_type=[1]), "missing or damaged"),
        (byte_level("gpt-2", tokens=["a"] * 16), "has a token twice"),
        (byte_level("gpt-2", tokens=[]), "missing or damaged"),
        (
            byte_level("gpt-2", bos_token_id=99, add_bos_token=True),
            "bos_token_id is 99, but must be below the number of tokens, 16",
        ),
        (sentencepiece(scores=None), "no scores"),
    ],
)
def test_a_damaged_or_unknown_vocabulary_is_refused(metadata: Fields, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        build_tokenizer(metadata)
