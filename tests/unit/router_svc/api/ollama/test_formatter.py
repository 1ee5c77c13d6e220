"""Answers as the client gets them: streamed and whole alike, for any split of the output."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import NoWorkers
from pdserve.base.sampling import FinishReason, TokenLogprobs
from router_svc.api.ollama.content import Piece
from router_svc.api.ollama.formatter import OllamaFormatter
from router_svc.api.ollama.timing import Timing
from router_svc.api.openai.chat_reading import ChatReading
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.messages.formats import FORMATS
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import TokenUsage

CALLS = (
    '<tool_call>\n{"name": "put", "arguments": {"a":\n [1, "x\\n"]}}\n</tool_call>'
    '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
)
TEXT = '<think>\nHm, "é".\n</think>\n\nSee\u2028\x85\u2029. \n' + CALLS
USAGE = TokenUsage(prompt_tokens=12, completion_tokens=9, cached_tokens=5)
START = datetime(2026, 11, 26, 12, tzinfo=UTC)


class _Bytes:
    """A tokenizer whose tokens are bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        """The byte."""
        return bytes([token_id])


def _reading(**changes: Any) -> ChatReading:
    values: dict[str, Any] = {"form": FORMATS["hermes"], "tools": {"put": {}, "get": {}}, "reads_calls": True}
    values |= {"is_named": False, "thinks": True, "shows_thinking": True, "start": ""}
    return ChatReading(**(values | changes))


def _formatter(
    reading: ChatReading | None, shape: Callable[[Piece], bytes] = Piece.to_message, clock: Iterator[int] | None = None
) -> OllamaFormatter:
    request = GenerationRequest(
        response_id="1",
        model="m",
        created=0,
        generations=(),
        stream=True,
        include_usage=False,
        continuous_usage=False,
        reading=reading,
    )
    ticks = count() if clock is None else clock
    return OllamaFormatter(request, Timing(lambda: next(ticks), lambda: START), shape, _Bytes())  # type: ignore[arg-type]


def _deltas(pieces: Sequence[str], reason: FinishReason = FinishReason.STOP) -> list[ChoiceDelta]:
    """A delta for each piece, which is a token, and one for the end."""
    tokens = [ChoiceDelta(choice_index=0, text=piece, token_ids=(7,), pieces=(piece,)) for piece in pieces]
    return [*tokens, ChoiceDelta(choice_index=0, text="", finish_reason=reason)]


def _stream(formatter: OllamaFormatter, deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
    """The lines, split as Ollama's client does: wherever Unicode has a line break."""

    async def stream() -> bytes:
        sent = await formatter.opening(USAGE)
        for delta in deltas:
            sent += await formatter.events([delta], None)
        return sent + await formatter.closing(USAGE)

    return [json.loads(line) for line in asyncio.run(stream()).decode().splitlines()]


def _whole(formatter: OllamaFormatter, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
    collected = formatter.new_collection()
    for delta in deltas:
        collected[0].add(delta)
    found: dict[str, Any] = json.loads(asyncio.run(formatter.whole(collected, USAGE)))
    return found


def _joined(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream as clients put it together."""
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    messages = [line["message"] for line in lines]
    joined: dict[str, Any] = {"role": "assistant", "content": "".join(each["content"] for each in messages)}
    if thinking := "".join(each.get("thinking", "") for each in messages):
        joined["thinking"] = thinking
    if calls := [call for each in messages for call in each.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    return {**lines[-1], "message": joined}


def _without_times(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if not name.endswith("_duration")}


def _split(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def test_thinking_text_and_calls_have_members_of_their_own() -> None:
    answer = _whole(_formatter(_reading()), _deltas([TEXT]))
    calls = answer["message"].pop("tool_calls")
    assert answer["message"] == {"role": "assistant", "content": "See\u2028\x85\u2029.", "thinking": 'Hm, "é".'}
    assert [call["function"] for call in calls] == [
        {"index": 0, "name": "put", "arguments": {"a": [1, "x\n"]}},
        {"index": 1, "name": "get", "arguments": {}},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert (answer["model"], answer["created_at"]) == ("m", "2026-11-26T12:00:00.000000Z")
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (12, 9)


@given(st.lists(st.integers(0, 500), max_size=12), st.sampled_from(FinishReason))
def test_any_split_of_the_stream_is_the_same_answer(cuts: list[int], reason: FinishReason) -> None:
    """Fails for calls that come in pieces, and with any line break left in a line."""
    for end in (len(TEXT), len(TEXT) - 60, TEXT.index("[1") + 2):
        whole = _whole(_formatter(_reading()), _deltas([TEXT[:end]], reason))
        streamed = _joined(_stream(_formatter(_reading()), _deltas(_split(TEXT[:end], cuts), reason)))
        assert _without_times(streamed) == _without_times(whole)
        assert whole["done_reason"] == reason.value


def test_a_call_that_was_cut_off_is_read_as_far_as_it_goes() -> None:
    answer = _whole(_formatter(_reading()), _deltas([TEXT[: TEXT.index("[1") + 2]], FinishReason.LENGTH))
    [call] = answer["message"]["tool_calls"]
    assert call["function"]["arguments"] == {"a": [1]}


def test_a_line_has_what_is_new_and_none_is_empty() -> None:
    lines = _stream(_formatter(_reading()), _deltas(["<think>\nH", "m.\n</th", "ink>\n\nSe", "e."]))
    assert [line["message"] for line in lines] == [
        {"role": "assistant", "content": "", "thinking": "H"},
        {"role": "assistant", "content": "", "thinking": "m."},
        {"role": "assistant", "content": "Se"},
        {"role": "assistant", "content": "e."},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize("shows", [True, False])
def test_a_single_prompt_has_a_response_and_thinking_unless_it_is_turned_off(shows: bool) -> None:
    reading = _reading(shows_thinking=shows, tools={}, reads_calls=False)
    answer = _whole(_formatter(reading, Piece.to_response), _deltas(["<think>\nHm.\n</think>\n\nSee."]))
    assert answer["response"] == "See."
    assert answer.get("thinking") == ("Hm." if shows else None)
    plain = _whole(_formatter(None, Piece.to_response), _deltas(["<think>Hm.</think>"]))
    assert (plain["response"], "thinking" in plain) == ("<think>Hm.</think>", False)


@pytest.mark.parametrize("is_streamed", [True, False])
def test_durations_are_those_until_and_behind_the_first_output(is_streamed: bool) -> None:
    formatter = _formatter(None, clock=iter((100, 130, 200)))
    deltas = _deltas(["a", "b", "c"])
    answer = _stream(formatter, deltas)[-1] if is_streamed else _whole(formatter, deltas)
    names = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
    assert [answer[name] for name in names] == [100, 0, 30, 70]


def test_log_probabilities_come_with_their_tokens_even_if_nothing_is_shown() -> None:
    entry = TokenLogprobs(logprob=-0.5, rank=2, top_ids=(66, 65), top_logprobs=(-0.25, -math.inf))
    text = "<think>\nA\n</think>\n\nA"
    deltas = [replace(each, token_ids=(65,), logprobs=(entry,)) for each in _deltas([*text])[:-1]] + _deltas([*text])[
        -1:
    ]
    reading = _reading(shows_thinking=False)
    *lines, end = _stream(_formatter(reading), deltas)
    assert len(lines) == len(text)
    top = [
        {"token_id": 66, "token": "B", "logprob": -0.25, "bytes": [66]},
        {"token_id": 65, "token": "A", "logprob": -9999.0, "bytes": [65]},
    ]
    shown = {"token_id": 65, "token": "A", "logprob": -0.5, "bytes": [65], "rank": 2, "top_logprobs": top}
    assert [line["logprobs"] for line in lines] == [[shown]] * len(text)
    assert "logprobs" not in end
    whole = _whole(_formatter(reading), deltas)
    assert whole["logprobs"] == [shown] * len(text)
    assert (whole["message"]["content"], whole["done"]) == ("A", True)


def test_an_error_is_a_line_of_its_own() -> None:
    line = _formatter(None).failed(NoWorkers("No worker\u2028 is ready."))
    assert line == b'{"error":"No worker\\u2028 is ready."}\n'
