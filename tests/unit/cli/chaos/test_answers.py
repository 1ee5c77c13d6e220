"""Answers are equal for equal tokens, however they were cut, and every kind of wrong token is found."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pdserve.cli.chaos.answers import Answer, ErrorInStream, Events, difference, head_difference, read_event


def chunk(text: str = "", *, index: int = 0, finish: str | None = None, response: str = "cmpl-1") -> dict[str, Any]:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish}
    return {"id": response, "choices": [choice]}


def chat_chunk(token: str) -> dict[str, Any]:
    logprobs = {"content": [{"token": token, "logprob": -0.5, "bytes": [1], "top_logprobs": []}], "refusal": None}
    choice = {"index": 0, "delta": {"content": token}, "logprobs": logprobs, "finish_reason": None}
    return {"id": "chatcmpl-1", "choices": [choice]}


def message_chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def call_delta(arguments: str, *, index: int = 0, name: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"tool_calls": [{"index": index, "function": function}]}


THOUGHT = [message_chunk(reasoning="Let"), message_chunk(reasoning=" me"), message_chunk(content="Yes.")]
CALLED = [
    *(message_chunk(**call_delta("", name="write")), message_chunk(**call_delta("{}"))),
    *(message_chunk(**call_delta("", index=1, name="read")), message_chunk(**call_delta("[1]", index=1))),
]
MESSAGE_USAGE = {
    "id": "chatcmpl-1",
    "choices": [],
    "usage": {"prompt_tokens": 3, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 2}},
}
MESSAGE = [*THOUGHT, *CALLED, message_chunk("tool_calls"), MESSAGE_USAGE]
USAGE = {"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}
GOOD = [chunk("ab"), chunk("x", index=1), chunk("c", finish="stop"), chunk("y", index=1, finish="length"), USAGE]


def answer(chunks: list[dict[str, Any]], *, is_complete: bool = True) -> Answer:
    found = Answer(is_complete=is_complete)
    for each in chunks:
        found.add(each)
    return found


def test_the_cut_into_chunks_does_not_matter() -> None:
    other = [chunk("a"), chunk("bc", finish="stop"), chunk("x", index=1), chunk("y", index=1, finish="length"), USAGE]
    assert difference(answer(other), answer(GOOD)) is None


@pytest.mark.parametrize(
    ("chunks", "found"),
    [
        ([chunk("ab"), *GOOD[1:2], chunk("bc", finish="stop"), *GOOD[3:]], "choice 0: text at character 2 of 3"),
        ([chunk("a"), *GOOD[1:]], "choice 0: text at character 1"),
        ([*GOOD, chunk(finish="stop")], "choice 0: finish reasons are"),
        ([*GOOD, USAGE], "usage is"),
        ([chunk("ab", response="cmpl-2"), *GOOD[1:]], "2 ids"),
        ([GOOD[0], GOOD[2], USAGE], r"choices are \[0\]"),
        (GOOD[:-1], "usage is"),
    ],
    ids=["repeated", "missing", "ended twice", "usage twice", "another id", "no choice", "no usage"],
)
def test_a_wrong_answer_is_found(chunks: list[dict[str, Any]], found: str) -> None:
    reason = difference(answer(chunks), answer(GOOD))
    assert reason is not None
    assert re.search(found, reason)


def test_a_message_is_the_same_whole_and_in_pieces() -> None:
    functions = ({"name": "write", "arguments": "{}"}, {"name": "read", "arguments": "[1]"})
    calls = [{"id": "call-1", "type": "function", "function": function} for function in functions]
    message = {"content": "Yes.", "reasoning": "Let me", "tool_calls": calls}
    whole = MESSAGE_USAGE | {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    assert difference(answer([whole]), answer(MESSAGE)) is None
    assert head_difference(answer(MESSAGE[:5]), answer([whole])) is None


@pytest.mark.parametrize(
    ("chunks", "found"),
    [
        ([*MESSAGE[:2], *MESSAGE[1:]], "choice 0: reasoning at character 6 of 6"),
        ([*MESSAGE[1:]], "choice 0: reasoning at character 0"),
        ([message_chunk(content="Let me"), *MESSAGE[2:]], "choice 0: text at character 0 of 4"),
        ([*MESSAGE[:4], *MESSAGE[3:]], "choice 0: name of call 0 at character 5"),
        ([*MESSAGE[:5], *MESSAGE[4:]], "choice 0: arguments of call 0 at character 2"),
        ([*MESSAGE[:5], *MESSAGE[7:]], r"choice 0: calls are \[0\], expected \[0, 1\]"),
        ([*MESSAGE[:-1], USAGE | {"id": "chatcmpl-1"}], r"usage is \[\(3, 4, 0\)\], expected \[\(3, 9, 2\)\]"),
    ],
    ids=["repeated", "missing", "thinking as text", "called twice", "arguments twice", "no call", "usage"],
)
def test_a_wrong_message_is_found(chunks: list[dict[str, Any]], found: str) -> None:
    reason = difference(answer(chunks), answer(MESSAGE))
    assert reason is not None
    assert re.search(found, reason)


def test_thinking_and_calls_of_a_client_that_left_are_a_head_of_the_answer() -> None:
    assert head_difference(answer(MESSAGE[:5]), answer(MESSAGE)) is None
    assert head_difference(answer([*MESSAGE[:2], MESSAGE[1]]), answer(MESSAGE)) is not None
    assert head_difference(answer([message_chunk(**call_delta("[", index=2, name="a"))]), answer(MESSAGE)) is not None


def test_an_answer_without_its_end_is_not_complete() -> None:
    assert difference(answer(GOOD, is_complete=False), answer(GOOD)) == "the answer is not complete"


def test_a_repeated_log_probability_is_found() -> None:
    expected = answer([chat_chunk("a"), chat_chunk("b")])
    repeated = answer([chat_chunk("a"), chat_chunk("b")])
    repeated.choices[0].logprobs.append(repeated.choices[0].logprobs[-1])
    assert difference(repeated, expected) == "choice 0: log-probabilities differ at token 2 (3 and 2)"


def test_a_client_that_left_must_have_a_head_of_the_answer() -> None:
    assert head_difference(answer([chunk("ab"), chunk("x", index=1)]), answer(GOOD)) is None
    assert head_difference(answer([chunk("b")]), answer(GOOD)) is not None


def test_events_arrive_in_any_pieces_with_their_ids_and_without_comments() -> None:
    text = b': keep-alive\n\nid: 1\ndata: {"a": "\xc3\xa9"}\n\nid: 2\r\ndata: [DONE]\r\n\r\n'
    for size in (1, 7, len(text)):
        events = Events()
        found = [each for start in range(0, len(text), size) for each in events.feed(text[start : start + size])]
        assert [(each.id, read_event(each)) for each in found] == [("1", {"a": "é"}), ("2", None)]


def test_an_error_in_a_stream_is_raised() -> None:
    with pytest.raises(ErrorInStream, match="worker_lost"):
        Answer().add(json.loads('{"error": {"type": "worker_lost"}}'))
