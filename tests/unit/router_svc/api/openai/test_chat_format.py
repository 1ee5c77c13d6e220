"""Chats as the client gets them: streamed and whole alike, on any router."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from pdserve.base.errors import StaleError
from pdserve.base.sampling import FinishReason
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.openai.chat_format import ChatFormat
from router_svc.api.openai.chat_reading import ChatReading
from router_svc.api.openai.choices import CollectedChoice
from router_svc.messages.formats import FORMATS
from router_svc.request.output import ChoiceDelta

_PIECES = (
    "<think>",
    "\nH",
    "m.",
    "</think>",
    "\n\nSee. ",
    '<tool_call>{"na',
    'me": "put", "arguments": ',
    '{"a": 1',
    "}",
)
_END = ("}", "</tool_call>")


def _reading(**changes: Any) -> ChatReading:
    values: dict[str, Any] = {"form": FORMATS["hermes"], "tools": {"put": {"a": frozenset({"integer"})}}}
    values |= {"reads_calls": True, "is_named": False, "thinks": True, "shows_thinking": True, "start": ""}
    return ChatReading(**(values | changes))


def _format(reading: ChatReading | None = None, response_id: str = "chatcmpl-1") -> ChatFormat:
    return ChatFormat(cast(Tokenizer, None), response_id, reading or _reading())


def _deltas() -> list[ChoiceDelta]:
    steps = [_PIECES[:1], _PIECES[1:4], *((piece,) for piece in _PIECES[4:]), _END]
    return [
        ChoiceDelta(
            choice_index=0,
            text="".join(pieces),
            pieces=pieces,
            token_ids=tuple(range(len(pieces))),
            finish_reason=FinishReason.STOP if pieces is _END else None,
        )
        for pieces in steps
    ]


def _whole(form: ChatFormat) -> Any:
    collected = CollectedChoice()
    for delta in _deltas():
        collected.add(delta)
    return json.loads(b"".join(form.whole(0, collected)))


def test_a_whole_message_has_what_the_stream_had() -> None:
    form, content, thinking, arguments, ids = _format(), "", "", "", []
    for chunk in filter(None, map(form.chunk, _deltas())):
        delta = chunk["delta"]
        content += delta.get("content", "")
        thinking += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            arguments += call["function"]["arguments"]
            ids += [call["id"]] if "id" in call else []
    whole = _whole(_format())
    [call] = whole["message"]["tool_calls"]
    assert (content, thinking) == (whole["message"]["content"], whole["message"]["reasoning"]) == ("See.", "Hm.")
    assert (arguments, ids) == (call["function"]["arguments"], [call["id"]])
    assert chunk["finish_reason"] == whole["finish_reason"] == "tool_calls"
    assert form.reasoning_tokens == 4


def test_another_router_makes_the_same_bytes() -> None:
    reading = _reading()
    again = ChatReading.from_text(reading.to_text(), FORMATS["hermes"])
    assert again == reading
    assert list(map(_format(again).chunk, _deltas())) == list(map(_format(reading).chunk, _deltas()))
    with pytest.raises(StaleError, match="read as hermes, and this router reads mistral"):
        ChatReading.from_text(reading.to_text(), FORMATS["mistral"])
    with pytest.raises(StaleError, match="plain text"):
        ChatReading.from_text(reading.to_text(), None)
    assert list(map(_format(again, "chatcmpl-2").chunk, _deltas())) != list(map(_format(reading).chunk, _deltas()))


def test_nothing_held_back_makes_a_chunk() -> None:
    form = _format()
    first = form.chunk(_deltas()[0])
    assert first is None


def test_a_named_function_ends_with_stop_and_thinking_may_be_left_out() -> None:
    whole = _whole(_format(_reading(is_named=True, shows_thinking=False)))
    assert whole["finish_reason"] == "stop"
    assert "reasoning" not in whole["message"]
    assert len(whole["message"]["tool_calls"]) == 1


def test_ids_of_mistral_have_nine_characters() -> None:
    reading = _reading(form=FORMATS["mistral"])
    form = _format(reading)
    delta = ChoiceDelta(choice_index=0, text='[TOOL_CALLS]put[ARGS]{"a": 1}', finish_reason=FinishReason.STOP)
    chunk = form.chunk(delta)
    assert chunk is not None
    assert len(chunk["delta"]["tool_calls"][0]["id"]) == 9


@pytest.mark.parametrize(
    ("text", "finish", "content", "arguments", "reason"),
    [
        # Cut by max_tokens: a client would show what is left of the second call.
        ('<tool_call>{"name": "pu', FinishReason.LENGTH, None, [], "length"),
        ('<tool_call>{"name": "put", "arguments": {}}</tool_call>\n<tool', FinishReason.LENGTH, None, ["{}"], "length"),
        # By a stop string: an agent would take the call for whole.
        ('<tool_call>{"name": "put", "arguments": {"a', FinishReason.STOP, None, ['{"a'], "stop"),
        ('<tool_call>{"name": "put", "arguments": {}}</tool_call>', FinishReason.STOP, None, ["{}"], "tool_calls"),
    ],
)
def test_required_calls_that_are_cut_leave_no_text_and_are_not_whole(
    text: str, finish: FinishReason, content: str | None, arguments: list[str], reason: str
) -> None:
    form = _format(_reading(requires_call=True, thinks=False))
    delta = ChoiceDelta(choice_index=0, text=text, pieces=tuple(text), finish_reason=finish)
    chunk = form.chunk(delta)
    assert chunk is not None
    assert (chunk["delta"].get("content"), chunk["finish_reason"]) == (content, reason)
    collected = CollectedChoice()
    collected.add(delta)
    whole = json.loads(b"".join(_format(_reading(requires_call=True, thinks=False)).whole(0, collected)))
    calls = whole["message"].get("tool_calls", [])
    assert ([call["function"]["arguments"] for call in calls], whole["finish_reason"]) == (arguments, reason)
    assert whole["message"]["content"] == (content if calls else "")
