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
        ([chunk("ab"), *GOOD[1:2], chunk("bc", finish="stop"), *GOOD[3:]], "choice 0: at character 2 of 3"),
        ([chunk("a"), *GOOD[1:]], "choice 0: at character 1"),
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
