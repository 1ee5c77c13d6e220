"""What the events of a stream say."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cli.bench.stream import Chunk, EventReader, NotACompletion, StreamRefused, Usage, read_chunk

STREAM = b': keep-alive\n\ndata: {"a": "\xc3\xa9"}\n\nevent: x\r\ndata:{"b": 1}\r\n\r\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": "\xc3\xa9"}', b'{"b": 1}', b"[DONE]"]


@settings(deadline=None)
@given(cuts=st.sets(st.integers(0, len(STREAM))))
def test_payloads_are_whole_however_the_bytes_come(cuts: set[int]) -> None:
    reader = EventReader()
    bounds = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in pairwise(bounds)]
    assert [payload for piece in pieces for payload in reader.feed(piece)] == PAYLOADS


def _text(text: str | None, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def _delta(finish_reason: str | None = None, **delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


@pytest.mark.parametrize(
    ("content", "chunk"),
    [
        (_text("a"), Chunk(text="a", has_choice=True, has_token=True)),
        (_text(""), Chunk(has_choice=True, has_token=True)),
        (_text("a", "length"), Chunk(text="a", has_choice=True, has_token=True, is_finished=True)),
        (_text("", "length"), Chunk(has_choice=True, is_finished=True)),
        (_text(None, "stop"), Chunk(has_choice=True, is_finished=True)),
        (_delta(role="assistant", content=""), Chunk(has_choice=True)),
        (_delta(role="assistant", content="a"), Chunk(text="a", has_choice=True, has_token=True)),
        (_delta(content="a"), Chunk(text="a", has_choice=True, has_token=True)),
        (_delta(reasoning_content="hm"), Chunk(text="hm", has_choice=True, has_token=True)),
        (_delta(reasoning="hm", content=None), Chunk(text="hm", has_choice=True, has_token=True)),
        (_delta("stop"), Chunk(has_choice=True, is_finished=True)),
        (
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
            Chunk(usage=Usage(input_tokens=3, output_tokens=2)),
        ),
        ({"choices": [], "usage": None}, Chunk()),
    ],
)
def test_a_chunk_says_whether_a_token_came(content: object, chunk: Chunk) -> None:
    assert read_chunk(json.dumps(content).encode()) == chunk


def test_usage_may_come_with_the_last_token() -> None:
    content = _text("a", "stop") | {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    assert read_chunk(json.dumps(content).encode()).usage == Usage(input_tokens=3, output_tokens=2)


@pytest.mark.parametrize("error", [{"message": "out of blocks", "code": 500}, "out of blocks"])
def test_an_error_in_the_stream_is_raised_with_its_words(error: object) -> None:
    with pytest.raises(StreamRefused, match="out of blocks"):
        read_chunk(json.dumps({"error": error}).encode())


@pytest.mark.parametrize("payload", [b"", b"hello", b"[1]", b'{"choices": [1]}', b'{"usage": {"a": 1}}', b"\xff"])
def test_anything_else_is_no_completion(payload: bytes) -> None:
    with pytest.raises(NotACompletion):
        read_chunk(payload)
