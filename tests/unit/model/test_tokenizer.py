"""Encoding, decoding by bytes, and streams that never emit half a character."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from pdserve.base.errors import RequestError, SetupError
from pdserve.model.tokenizer import StreamDetokenizer, Tokenizer
from pdserve.model.tokenizer_file import read_tokenizer
from tests.unit.model.vocabularies import byte_level, sentencepiece

RAW = {"byte_level": byte_level(), "sentencepiece": sentencepiece()}
KINDS = {name: Tokenizer(raw) for name, raw in RAW.items()}
TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("한국어🙂👩‍👧🇰🇷é▁ ")), max_size=40)

kinds = pytest.mark.parametrize("kind", KINDS)


def streamed(tokenizer: Tokenizer, ids: list[int], skip: bool, size: int = 1) -> list[str]:
    stream = StreamDetokenizer(tokenizer, skip_special_tokens=skip)
    return [*(stream.push(ids[start : start + size]) for start in range(0, len(ids), size)), stream.finish()]


@kinds
@given(text=TEXTS)
@settings(deadline=None)
@example(text="안녕하세요 🙂👩‍👩‍👧‍👦 hello world")
def test_a_stream_gives_the_encoded_text_and_never_half_a_character(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text.replace("▁", ""), add_special_tokens=False)
    increments = streamed(tokenizer, ids, skip=False)
    assert "".join(increments) == text.replace("▁", "")
    if "\ufffd" not in text:
        assert not any("\ufffd" in increment for increment in increments)


@kinds
@given(ids=st.lists(st.integers(0, 280), max_size=60), skip=st.booleans(), size=st.integers(1, 5))
@settings(deadline=None)
def test_streaming_any_tokens_gives_the_same_text_as_decoding_them(
    kind: str, ids: list[int], skip: bool, size: int
) -> None:
    tokenizer = KINDS[kind]
    assert "".join(streamed(tokenizer, ids, skip, size)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(ids=st.lists(st.integers(0, 265), max_size=60), skip=st.booleans())
@settings(deadline=None)
def test_byte_level_decoding_equals_the_librarys_even_for_invalid_bytes(ids: list[int], skip: bool) -> None:
    expected = RAW["byte_level"].decode(ids, skip_special_tokens=skip)
    assert KINDS["byte_level"].decode(ids, skip_special_tokens=skip) == expected


@given(text=TEXTS, skip=st.booleans())
@settings(deadline=None)
def test_sentencepiece_decoding_equals_the_librarys_for_text(text: str, skip: bool) -> None:
    ids = [1, *RAW["sentencepiece"].encode(text, add_special_tokens=False).ids, 2]
    expected = RAW["sentencepiece"].decode(ids, skip_special_tokens=skip)
    assert KINDS["sentencepiece"].decode(ids, skip_special_tokens=skip) == expected


@kinds
@given(text=TEXTS, share=st.floats(0, 1))
@settings(deadline=None)
def test_a_text_that_goes_on_with_another_is_the_rest_of_both_decoded_together(
    kind: str, text: str, share: float
) -> None:
    """Decoded apart, both have U+FFFD for a character at the border, and SentencePiece's lose the space there."""
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text, add_special_tokens=False)
    border = max(1, round(share * len(ids)))
    before = StreamDetokenizer(tokenizer)
    start = before.push(ids[:border])
    behind = StreamDetokenizer(tokenizer, unfinished=before.unfinished)
    assert start + behind.push(ids[border:]) + behind.finish() == tokenizer.decode(ids)


def test_an_incomplete_character_is_held_back_and_replaced_at_the_end() -> None:
    tokenizer = KINDS["byte_level"]
    first_bytes = tokenizer.encode("🙂")[:2]
    stream = StreamDetokenizer(tokenizer)
    assert [stream.push([token]) for token in first_bytes] == ["", ""]
    assert stream.finish() == "\ufffd"


def test_an_invalid_byte_does_not_hold_back_later_text() -> None:
    tokenizer = KINDS["sentencepiece"]
    stream = StreamDetokenizer(tokenizer)
    byte = RAW["sentencepiece"].token_to_id("<0xFF>")
    letter = RAW["sentencepiece"].token_to_id("a")
    assert [stream.push([byte]), stream.push([letter])] == ["\ufffd", "a"]


def test_each_byte_is_decoded_once_even_in_a_long_run_of_invalid_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []
    utf8 = codecs.getincrementaldecoder("utf-8")

    class Counting(utf8):  # type: ignore[valid-type, misc]
        def decode(self, data: bytes, final: bool = False) -> str:
            lengths.append(len(data))
            return str(super().decode(data, final))

        def _buffer_decode(self, data: bytes, errors: str, final: bool) -> tuple[str, int]:
            # With what the decoder has kept of earlier calls.
            assert len(data) <= lengths[-1] + 3
            text, consumed = super()._buffer_decode(data, errors, final)
            return text, consumed

    monkeypatch.setattr(codecs, "getincrementaldecoder", lambda name: Counting)
    stream = StreamDetokenizer(KINDS["byte_level"])
    continuation = RAW["byte_level"].token_to_id("Ģ")
    text = "".join(stream.push([continuation]) for _ in range(5000)) + stream.finish()
    assert text == "\ufffd" * 5000
    assert lengths == [1] * 5000 + [0]


def test_special_tokens_are_skipped_only_on_request() -> None:
    tokenizer = KINDS["byte_level"]
    ids = tokenizer.encode("he<|end|>ll")
    assert tokenizer.decode(ids) == "hell"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "he<|end|>ll"


def test_added_tokens_with_spaces_or_without_latin_letters_decode_to_themselves() -> None:
    tokenizer = KINDS["byte_level"]
    assert tokenizer.decode(tokenizer.encode("two words <tag>한국어!")) == "two words <tag>한국어!"


def test_a_token_may_be_an_incomplete_character_or_none_at_all() -> None:
    tokenizer = KINDS["byte_level"]
    first_byte = tokenizer.encode("é")[0]
    assert tokenizer.token_bytes(first_byte) == b"\xc3"
    assert tokenizer.token_str(first_byte) == "\ufffd"
    assert tokenizer.token_bytes(10**6) == b""
    assert tokenizer.decode([10**6]) == ""


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_metaspace_decoding_equals_the_librarys(scheme: str) -> None:
    raw = sentencepiece(decoders.Metaspace(prepend_scheme=scheme))
    ids = [raw.token_to_id(token) for token in ("▁a", "b", "▁ab")]
    assert Tokenizer(raw).decode(ids) == raw.decode(ids)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder()])
def test_an_unknown_decoder_is_refused(decoder: decoders.Decoder | None) -> None:
    raw = RawTokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        raw.decoder = decoder
    with pytest.raises(SetupError, match="is not supported; supported: ByteLevel"):
        Tokenizer(raw)


def test_from_dir_reads_end_of_text_tokens_and_disables_truncation_and_padding(tmp_path: Path) -> None:
    raw = byte_level()
    raw.enable_truncation(3)
    raw.enable_padding(length=10)
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [262, 3]}')
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.eos_token_ids == (262, 3)
    assert len(tokenizer.encode("abcdefgh")) == 8
    assert tokenizer.vocab_size == 266


@kinds
def test_ids_by_which_a_models_vocabulary_is_padded_have_no_text_and_disturb_none(kind: str) -> None:
    """Fails when an id without a token is an error: a model may sample one at any time."""
    tokenizer = KINDS[kind]
    text, unknown = "hello", [tokenizer.vocab_size, 2**31, 2**32 - 1]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(unknown) == ""
    assert "".join(streamed(tokenizer, [*unknown, *ids, *unknown], skip=True)) == text
    assert [tokenizer.token_str(each) for each in unknown] == [""] * 3


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": 3}'])
def test_a_broken_tokenizer_file_is_a_setup_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SetupError, match=r"tokenizer\.json is not a valid tokenizer"):
        read_tokenizer(tmp_path)


def test_a_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"Cannot read .*tokenizer\.json"):
        read_tokenizer(tmp_path)


def test_a_regular_expression_that_runs_away_ends_with_an_error_of_the_request() -> None:
    raw = byte_level()
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    with pytest.raises(RequestError, match="retry-limit-in-match over"):
        Tokenizer(raw).encode("a" * 40)
