"""Events of a response as the official client knows them, complete and equal to the whole object."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pdserve.base.errors import PeerLost, TooLarge
from pdserve.base.sampling import FinishReason, TokenLogprobs
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.event_ids import EventIds, parse_event_id
from router_svc.api.openai.chat_reading import ChatReading
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.responses import encoding
from router_svc.api.responses.formatter import ResponsesFormatter
from router_svc.messages.formats import FORMATS
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import TokenUsage
from router_svc.state.response_record import ShownResponse
from tests.support.lazily import openai

_USAGE = TokenUsage(prompt_tokens=7, completion_tokens=9, cached_tokens=3)
_TEXT = (
    '<think>\nHm.\n</think>\n\nSee. <tool_call>{"name": "put", "arguments": {"a": 1}}</tool_call>'
    '\n<tool_call>{"name": "shell.run", "arguments": {"input": "ls \\"ä\\""}}</tool_call>'
)


@cache
def _event_type() -> TypeAdapter[Any]:
    return TypeAdapter(openai.types.responses.ResponseStreamEvent)


def _request(*, reads: bool = True, encodes: bool = False) -> GenerationRequest:
    tools = {"put": {"a": frozenset({"integer"})}, "shell.run": {}}
    reading = ChatReading(
        form=FORMATS["hermes"],
        tools=tools,
        reads_calls=True,
        is_named=False,
        thinks=True,
        shows_thinking=True,
        start="",
    )
    repeated = {
        "instructions": None, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0, "top_p": 1.0,
        "tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}}, "top_logprobs": 0, "store": False,
        "truncation": "disabled",
    }  # fmt: skip
    fields = {"repeated": repeated, "names": {"shell.run": ["run", "shell", True]}, "has_logprobs": False}
    return GenerationRequest(
        response_id="resp_1",
        model="m",
        created=5,
        generations=(),
        stream=True,
        include_usage=False,
        continuous_usage=False,
        reading=reading if reads else None,
        request_fields=json.dumps(fields | {"encodes_thinking": encodes, "kept": None}),
    )


class _Bytes:
    """A tokenizer whose tokens are bytes."""

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def _formatter(request: GenerationRequest | None = None, ids: EventIds | None = None) -> ResponsesFormatter:
    return ResponsesFormatter(request or _request(), cast(Tokenizer, _Bytes()), ids)


def _deltas(text: str, cuts: Sequence[int] = (), end: FinishReason = FinishReason.STOP) -> list[ChoiceDelta]:
    """A delta for each step, with a token for each character."""
    bounds = [0, *sorted(cuts), len(text)]
    steps = [text[start:stop] for start, stop in itertools.pairwise(bounds)]
    return [
        ChoiceDelta(
            choice_index=0,
            text=step,
            pieces=tuple(step),
            token_ids=tuple(range(len(step))),
            finish_reason=end if index == len(steps) - 1 else None,
        )
        for index, step in enumerate(steps)
    ]


def _stream(formatter: ResponsesFormatter, deltas: Sequence[ChoiceDelta]) -> bytes:
    async def run() -> bytes:
        sent = await formatter.opening(_USAGE)
        for delta in deltas:
            sent += await formatter.events([delta], None)
        return sent + await formatter.closing(_USAGE)

    return asyncio.run(run())


def _parsed(stream: bytes) -> list[dict[str, Any]]:
    events = []
    for block in stream.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append(json.loads(fields["data"]))
        assert fields["event"] == events[-1]["type"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def _whole(formatter: ResponsesFormatter, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
    [collected] = formatter.new_collection()
    for delta in deltas:
        collected.add(delta)
    found: dict[str, Any] = json.loads(asyncio.run(formatter.whole([collected], _USAGE)))
    return found


def _without_time(response: dict[str, Any]) -> dict[str, Any]:
    return {**response, "completed_at": None}


def test_the_events_of_thinking_text_and_calls() -> None:
    events = _parsed(_stream(_formatter(), _deltas(_TEXT)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    runs = [kind for index, kind in enumerate(kinds) if not index or kind != kinds[index - 1]]
    starts = ["output_item.added", "content_part.added"]
    ends = ["content_part.done", "output_item.done"]
    assert runs == [
        *("created", "in_progress"),
        *(*starts, "reasoning_text.delta", "reasoning_text.done", *ends),
        *(*starts, "output_text.delta", "output_text.done", *ends),
        *("output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        *("output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done", "output_item.done"),
        "completed",
    ]
    for event in events:
        _event_type().validate_python(event)
    response = events[-1]["response"]
    thinking, message, call, custom = response["output"]
    assert thinking["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert message["content"][0]["text"] == "See."
    assert (call["name"], call["arguments"]) == ("put", '{"a": 1}')
    assert (custom["name"], custom["namespace"], custom["input"]) == ("run", "shell", 'ls "ä"')
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == len(">\nHm.\n</think>")
    assert openai.types.responses.Response.model_validate(response).output_text == "See."


@given(st.lists(st.integers(0, len(_TEXT)), max_size=12))
def test_any_split_of_the_stream_gives_the_same_response(cuts: list[int]) -> None:
    """Every `added` has its `done`, with the ids of the final object: vllm#42407, #56285."""
    events = _parsed(_stream(_formatter(), _deltas(_TEXT, cuts)))
    response = events[-1]["response"]
    assert _without_time(response) == _without_time(_whole(_formatter(), _deltas(_TEXT)))
    added = {event["item"]["id"]: event for event in events if event["type"] == "response.output_item.added"}
    done = {event["item"]["id"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    assert list(added) == list(done) == [item["id"] for item in response["output"]]
    assert list(done.values()) == response["output"]
    for item in response["output"]:
        own = [event for event in events if event.get("item_id") == item["id"]]
        deltas = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        whole = item.get("arguments", item.get("input")) or item["content"][0]["text"]
        assert deltas == whole


def test_a_response_that_was_cut_is_incomplete() -> None:
    cut = _TEXT[: _TEXT.index('"a": 1')]
    events = _parsed(_stream(_formatter(), _deltas(cut, end=FinishReason.LENGTH)))
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["completed", "completed", "incomplete"]
    assert response["usage"]["total_tokens"] == 16
    openai.types.responses.Response.model_validate(response)


def test_no_output_is_a_message_without_text() -> None:
    [message] = _whole(_formatter(), _deltas(""))["output"]
    assert (message["type"], message["content"][0]["text"]) == ("message", "")


def test_a_model_without_a_form_gives_text() -> None:
    [message] = _whole(_formatter(_request(reads=False)), _deltas(_TEXT))["output"]
    assert message["content"][0]["text"] == _TEXT


def test_thinking_can_be_sent_back_without_a_store() -> None:
    events = _parsed(_stream(_formatter(_request(encodes=True)), _deltas(_TEXT)))
    items = [event["item"] for event in events if event["type"].startswith("response.output_item")]
    assert ["encrypted_content" in item for item in items if item["type"] == "reasoning"] == [False, True]


def test_a_stream_that_fails_ends_in_one_response_with_the_error() -> None:
    formatter = _formatter()
    sent = asyncio.run(formatter.opening(_USAGE))
    [first, *_] = _deltas(_TEXT, [40])
    sent += asyncio.run(formatter.events([first], None)) + formatter.failed(PeerLost("The worker was lost."))
    events = _parsed(sent)
    assert [event["type"] for event in events].count("response.failed") == 1
    failed = events[-1]["response"]
    assert failed["error"] == {"code": "server_error", "message": "The worker was lost."}
    assert (failed["status"], failed["output"][-1]["status"]) == ("failed", "incomplete")
    # The official client raises for an event with an error of its own.
    assert "error" not in events[-1]
    _event_type().validate_python(events[-1])


@pytest.mark.parametrize("seen", range(0, len(_TEXT), 9))
def test_another_router_goes_on_behind_any_event(seen: int) -> None:
    deltas = _deltas(_TEXT, range(1, len(_TEXT)))
    all_of_it = _stream(_formatter(ids=EventIds("9f3c01aa", 1)), deltas)
    blocks = all_of_it.split(b"\n\n")[:-1]
    known = [index for index, block in enumerate(blocks) if block.startswith(b"id: ")]
    last = known[min(seen, len(known) - 1)]
    header = blocks[last].split(b"\n", 1)[0].removeprefix(b"id: ").decode()
    rest = _stream(_formatter(ids=EventIds("9f3c01aa", 1, parse_event_id(header))), deltas)
    assert rest == b"".join(block + b"\n\n" for block in blocks[last + 1 :])


def _scored(text: str) -> list[ChoiceDelta]:
    """A delta for each token, with two alternatives."""
    return [
        replace(
            delta,
            token_ids=(ord(delta.text),),
            logprobs=(TokenLogprobs(logprob=-index - 1.0, rank=1, top_ids=(65, 66), top_logprobs=(-0.5, -1.5)),),
        )
        for index, delta in enumerate(_deltas(text, range(1, len(text))))
    ]


def test_log_probabilities_are_encoded_once_for_all_their_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a long answer take the event loop for a second, and four events and the store have them."""
    encoded, encode = [], encoding.to_json

    def counting(value: object) -> bytes:
        made = encode(value)
        encoded.extend(re.findall(rb'"logprob":(-[0-9.]+),"bytes":[^:]*,"rank"', made))
        return made

    monkeypatch.setattr(encoding, "to_json", counting)
    kept: list[ShownResponse] = []

    async def keep(response: ShownResponse) -> bool:
        kept.append(response)
        return True

    request = _request(reads=False)
    formatter = ResponsesFormatter(request, cast(Tokenizer, _Bytes()), None, keep)
    events = _parsed(_stream(formatter, _scored("See.")))
    assert encoded == [b"-1.0", b"-2.0", b"-3.0", b"-4.0"]
    by_type = {event["type"].removeprefix("response."): event for event in events}
    deltas = [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]]
    assert [each["logprob"] for each in deltas] == [-1.0, -2.0, -3.0, -4.0]
    assert by_type["content_part.added"]["part"]["logprobs"] == []
    assert by_type["output_text.done"]["logprobs"] == deltas
    assert by_type["content_part.done"]["part"]["logprobs"] == deltas
    assert by_type["output_item.done"]["item"]["content"][0]["logprobs"] == deltas
    response = by_type["completed"]["response"]
    assert response["output"][0]["content"][0]["logprobs"] == deltas
    # What is stored is sent as it is, and a conversation goes on from its text alone.
    assert json.loads(kept[0].body) == response | {"store": False}
    assert [content.keys() for content in kept[0].output[0]["content"]] == [{"type", "text"}]
    encoded.clear()
    assert _without_time(_whole(_formatter(request), _scored("See."))) == _without_time(response)
    assert len(encoded) == 4


def test_a_response_that_is_not_stored_says_so() -> None:
    async def keep(response: ShownResponse) -> bool:
        return False

    request = _request()
    fields = json.loads(request.request_fields)
    fields["repeated"]["store"] = True
    request = replace(request, request_fields=json.dumps(fields))
    formatter = ResponsesFormatter(request, cast(Tokenizer, _Bytes()), None, keep)
    assert _parsed(_stream(formatter, _deltas("See.")))[-1]["response"]["store"] is False
    # A response in the foreground that fails is stored nowhere.
    formatter = ResponsesFormatter(request, cast(Tokenizer, _Bytes()), None, keep)
    [failed] = _parsed(formatter.failed(PeerLost("The worker was lost.")))
    assert failed["response"]["store"] is False
    # One in the background is.
    [failed] = _parsed(ResponsesFormatter(request, cast(Tokenizer, _Bytes())).failed(PeerLost("It was lost.")))
    assert failed["response"]["store"] is True


def test_a_response_that_is_too_large_ends_in_one_event_without_output() -> None:
    formatter = _formatter()
    stream = _stream(formatter, _deltas("See."))
    last = stream.split(b"\n\n")[-2] + b"\n\n"
    events = _parsed(stream.removesuffix(last) + formatter.failed_at_end(TooLarge("It is too large.")))
    assert [event["type"] for event in events][-1] == "response.failed"
    assert (events[-1]["response"]["status"], events[-1]["response"]["output"]) == ("failed", [])
    assert formatter.num_events == len(events)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda each: st.lists(each) | st.dictionaries(st.sampled_from(["output", "item", "content", "other"]), each),
)


@given(_JSON)
def test_pieces_are_the_json_of_a_value(value: object) -> None:
    assert b"".join(encoding.pieces_of(value)) == encoding.to_json(value)
