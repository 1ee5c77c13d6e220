"""Events of a stream become chunks."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cli.bench.stream import (
    CompletionChunk,
    EventReader,
    NotACompletion,
    StreamRefused,
    TokenCounts,
    read_chunk,
)

STREAM = b': keep-alive\n\ndata: {"a": "\xc3\xa9"}\n\nevent: x\r\ndata:{"b": 1}\r\n\r\ndata: [DONE]\n\n'
PAYLOADS = [b'{"a": "\xc3\xa9"}', b'{"b": 1}', b"[DONE]"]


@settings(deadline=None)
@given(cuts=st.sets(st.integers(0, len(STREAM))))
def test_payloads_are_complete_however_the_bytes_are_split(cuts: set[int]) -> None:
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
        (_text("a"), CompletionChunk(text="a", has_choice=True, has_token=True)),
        (_text(""), CompletionChunk(has_choice=True, has_token=True)),
        (_text("a", "length"), CompletionChunk(text="a", has_choice=True, has_token=True, is_finished=True)),
        (_text("", "length"), CompletionChunk(has_choice=True, is_finished=True)),
        (_text(None, "stop"), CompletionChunk(has_choice=True, is_finished=True)),
        (_delta(role="assistant", content=""), CompletionChunk(has_choice=True)),
        (_delta(role="assistant", content="a"), CompletionChunk(text="a", has_choice=True, has_token=True)),
        (_delta(content="a"), CompletionChunk(text="a", has_choice=True, has_token=True)),
        (_delta(reasoning_content="hm"), CompletionChunk(text="hm", has_choice=True, has_token=True)),
        (_delta(reasoning="hm", content=None), CompletionChunk(text="hm", has_choice=True, has_token=True)),
        (_delta("stop"), CompletionChunk(has_choice=True, is_finished=True)),
        (
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
            CompletionChunk(usage=TokenCounts(input_tokens=3, output_tokens=2)),
        ),
        ({"choices": [], "usage": None}, CompletionChunk()),
    ],
)
def test_a_chunk_states_whether_it_carries_a_token(content: object, chunk: CompletionChunk) -> None:
    assert read_chunk(json.dumps(content).encode()) == chunk


def test_usage_may_come_with_the_last_token() -> None:
    content = _text("a", "stop") | {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    assert read_chunk(json.dumps(content).encode()).usage == TokenCounts(input_tokens=3, output_tokens=2)


@pytest.mark.parametrize("error", [{"message": "out of blocks", "code": 500}, "out of blocks"])
def test_an_error_in_the_stream_is_raised_with_its_message(error: object) -> None:
    with pytest.raises(StreamRefused, match="out of blocks"):
        read_chunk(json.dumps({"error": error}).encode())


@pytest.mark.parametrize("payload", [b"", b"hello", b"[1]", b'{"choices": [1]}', b'{"usage": {"a": 1}}', b"\xff"])
def test_any_other_payload_is_refused(payload: bytes) -> None:
    with pytest.raises(NotACompletion):
        read_chunk(payload)
