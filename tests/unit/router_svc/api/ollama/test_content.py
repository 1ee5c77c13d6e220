"""The content of answers: what comes with what."""

from __future__ import annotations

from router_svc.api.ollama.content import ContentReader
from router_svc.messages.events import CallArguments, CallOpened, Text


def _reader() -> ContentReader:
    return ContentReader(str, shows_thinking=True)


def test_a_call_comes_with_the_text_that_follows_it_and_not_at_the_end() -> None:
    for is_thinking in (False, True):
        reader = _reader()
        held = reader.push([CallOpened(index=0, name="put"), CallArguments(index=0, text='{"a":1}')])
        assert held.is_empty
        piece = reader.push([Text(text="See.", is_thinking=is_thinking)])
        assert [(call.index, call.name, call.arguments) for call in piece.calls] == [(0, "put", '{"a":1}')]
        assert (piece.text, piece.thinking) == (([], ["See."]) if is_thinking else (["See."], []))
        assert reader.finish().is_empty


def test_a_call_ends_the_one_before_it() -> None:
    reader = _reader()
    piece = reader.push(
        [CallOpened(index=0, name="a"), CallArguments(index=0, text="{}"), CallOpened(index=1, name="b")]
    )
    assert [call.name for call in piece.calls] == ["a"]
    assert [call.name for call in reader.finish().calls] == ["b"]
