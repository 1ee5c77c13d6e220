"""Messages as the client gets them: streamed and whole alike, for any split of the output, on any router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from pdserve.base.errors import NoWorkers
from pdserve.base.sampling import FinishReason
from pdserve.peers.secret import ClusterSecret
from router_svc.api.anthropic.answers import MessageEvent
from router_svc.api.anthropic.formatter import MessageFormatter, request_fields
from router_svc.api.anthropic.signatures import Signer
from router_svc.api.event_ids import EventIds, parse_event_id
from router_svc.api.openai.chat_reading import ChatReading
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.messages.formats import FORMATS
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import TokenUsage
from tests.support.lazily import anthropic

TEXT = (
    '<think>\nHm, "é".\n</think>\n\nSee. \n<tool_call>\n{"name": "put", "arguments": {"a": [1, "x\\n"]}}\n</tool_call>'
    '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
)
USAGE = TokenUsage(prompt_tokens=12, completion_tokens=9, cached_tokens=5)
SIGNER = Signer(ClusterSecret((b"s" * 32,)))


@cache
def _event_type() -> TypeAdapter[Any]:
    return TypeAdapter(anthropic.types.RawMessageStreamEvent)


def _reading(**changes: Any) -> ChatReading:
    values: dict[str, Any] = {"form": FORMATS["hermes"], "tools": {"put": {}, "get": {}}, "reads_calls": True}
    values |= {"is_named": False, "thinks": True, "shows_thinking": True, "start": ""}
    return ChatReading(**(values | changes))


def _formatter(
    reading: ChatReading | None, *, omits: bool = False, signer: Signer = SIGNER, ids: EventIds | None = None
) -> MessageFormatter:
    request = GenerationRequest(
        response_id="msg_1",
        model="m",
        created=0,
        generations=(),
        stream=True,
        include_usage=False,
        continuous_usage=False,
        reading=reading,
        request_fields=request_fields(omits_thinking=omits, length_reason="max_tokens"),
    )
    return MessageFormatter(request, signer, ids)


def _deltas(
    pieces: Sequence[str], reason: FinishReason = FinishReason.STOP, stop: str | int | None = None
) -> list[ChoiceDelta]:
    """A delta for each piece, which is a token, and one for the end."""
    tokens = [ChoiceDelta(choice_index=0, text=piece, token_ids=(7,), pieces=(piece,)) for piece in pieces]
    return [*tokens, ChoiceDelta(choice_index=0, text="", finish_reason=reason, stop_reason=stop)]


def _stream(formatter: MessageFormatter, deltas: Sequence[ChoiceDelta]) -> bytes:
    async def stream() -> bytes:
        sent = await formatter.opening(USAGE)
        for delta in deltas:
            sent += await formatter.events([delta], None)
        return sent + await formatter.closing(USAGE)

    return asyncio.run(stream())


def _events(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for event in stream.decode().split("\n\n")[:-1]:
        *_, name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def _joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message as Anthropic's client puts it together."""
    from anthropic.lib.streaming._messages import accumulate_event

    snapshot, buffers = None, dict[int, bytes]()
    for event in events:
        parsed = _event_type().validate_python(event)
        snapshot = accumulate_event(event=parsed, current_snapshot=snapshot, json_bufs=buffers)
    assert snapshot is not None
    return json.loads(snapshot.to_json(exclude_none=True))


def _whole(formatter: MessageFormatter, deltas: Sequence[ChoiceDelta]) -> dict[str, Any]:
    collected = formatter.new_collection()
    for delta in deltas:
        collected[0].add(delta)
    return json.loads(asyncio.run(formatter.whole(collected, USAGE)))


def _split(text: str, cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted({cut % (len(text) + 1) for cut in cuts}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def test_the_events_come_in_order_and_each_block_is_closed_before_the_next() -> None:
    """Thinking has its signature before its end (sglang#39752), and the start has type and role (vllm#45367)."""
    events = _events(_stream(_formatter(_reading()), _deltas([TEXT])))
    for event in events:
        TypeAdapter[Any](MessageEvent).validate_python(event, strict=True)
    assert [(event["type"], event.get("index")) for event in events] == [
        ("message_start", None),
        *((f"content_block_{name}", 0) for name in ("start", "delta", "delta", "stop")),
        *((f"content_block_{name}", index) for index in (1, 2, 3) for name in ("start", "delta", "stop")),
        ("message_delta", None),
        ("message_stop", None),
    ]
    start, end = events[0]["message"], events[-2]
    assert (start["type"], start["role"], start["content"], start["stop_reason"]) == ("message", "assistant", [], None)
    assert start["usage"]["output_tokens"] == 0
    kinds = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert kinds == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta"]
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_input_tokens_are_without_those_of_the_cache() -> None:
    deltas = _deltas(["<think>", "\nH", "m.", "</think>", "Hi"])
    events = _events(_stream(_formatter(_reading()), deltas))
    for usage in (events[-2]["usage"], _whole(_formatter(_reading()), deltas)["usage"]):
        assert usage == {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 5,
            "output_tokens": 9,
            "output_tokens_details": {"thinking_tokens": 4},
        }
    assert events[0]["message"]["usage"]["input_tokens"] == 7
    assert "output_tokens_details" not in _whole(_formatter(None), _deltas(["x"]))["usage"]


def test_a_start_with_the_end_of_the_message_has_no_end() -> None:
    last = replace(_deltas([])[-1], text="Hi", token_ids=(7,), pieces=("Hi",))
    start = _events(_stream(_formatter(None), [last]))[0]["message"]
    assert (start["stop_reason"], start["usage"]["output_tokens"]) == (None, 0)


@given(st.lists(st.integers(0, len(TEXT)), max_size=12), st.integers(0, len(TEXT)))
def test_any_split_has_the_blocks_of_the_whole_message(cuts: list[int], end: int) -> None:
    """The client's own code joins them, also those of an output that was cut off anywhere."""
    pieces = _split(TEXT[:end], cuts)
    events = _events(_stream(_formatter(_reading()), _deltas(pieces, FinishReason.LENGTH)))
    whole = _whole(_formatter(_reading()), _deltas(pieces, FinishReason.LENGTH))
    assert _joined(events) == {key: value for key, value in whole.items() if value is not None}
    assert whole["content"] == _whole(_formatter(_reading()), _deltas([TEXT[:end]]))["content"]
    assert whole["content"]


def test_a_whole_message() -> None:
    message = _whole(_formatter(_reading()), _deltas([TEXT]))
    thinking, text, put, get = message.pop("content")
    assert thinking.pop("signature")
    assert thinking == {"type": "thinking", "thinking": 'Hm, "é".'}
    assert text == {"type": "text", "text": "See."}
    ids = put.pop("id"), get.pop("id")
    assert len(set(ids)) == 2
    assert all(each.startswith("toolu_") and len(each) == 30 for each in ids)
    assert put == {"type": "tool_use", "name": "put", "input": {"a": [1, "x\n"]}}
    assert get == {"type": "tool_use", "name": "get", "input": {}}
    del message["usage"]
    assert message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "stop_reason": "tool_use",
        "stop_sequence": None,
    }


@pytest.mark.parametrize("reading", [None, _reading()])
def test_an_empty_output_is_one_empty_text(reading: ChatReading | None) -> None:
    assert _whole(_formatter(reading), _deltas([]))["content"] == [{"type": "text", "text": ""}]
    joined = _joined(_events(_stream(_formatter(reading), _deltas([]))))
    assert joined["content"] == [{"type": "text", "text": ""}]


def test_plain_text_is_not_read() -> None:
    assert _whole(_formatter(None), _deltas([TEXT, " "]))["content"] == [{"type": "text", "text": TEXT + " "}]


@pytest.mark.parametrize(
    ("text", "reason", "stop", "expected"),
    [
        ("Hi", FinishReason.STOP, None, ("end_turn", None)),
        ("Hi", FinishReason.STOP, 17, ("end_turn", None)),
        ("Hi", FinishReason.LENGTH, None, ("max_tokens", None)),
        ("Hi", FinishReason.STOP, "\n\n", ("stop_sequence", "\n\n")),
        (TEXT, FinishReason.STOP, None, ("tool_use", None)),
        (TEXT, FinishReason.STOP, "x", ("stop_sequence", "x")),
        (TEXT[:-30], FinishReason.LENGTH, None, ("max_tokens", None)),
    ],
)
def test_the_reason_of_the_end(
    text: str, reason: FinishReason, stop: str | int | None, expected: tuple[str, str | None]
) -> None:
    deltas = _deltas([text], reason, stop)
    whole = _whole(_formatter(_reading()), deltas)
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    ends = _events(_stream(_formatter(_reading()), deltas))[-2]["delta"]
    assert (ends["stop_reason"], ends["stop_sequence"]) == expected


def test_a_function_that_the_client_has_named_ends_with_its_use_too() -> None:
    assert _whole(_formatter(_reading(is_named=True)), _deltas([TEXT]))["stop_reason"] == "tool_use"


def test_thinking_can_be_left_out_and_its_text_alone() -> None:
    hidden = _whole(_formatter(_reading(shows_thinking=False)), _deltas([TEXT]))["content"]
    assert [block["type"] for block in hidden] == ["text", "tool_use", "tool_use"]
    shown = _whole(_formatter(_reading()), _deltas([TEXT]))["content"]
    omitted = _whole(_formatter(_reading(), omits=True), _deltas([TEXT]))["content"]
    assert omitted == [shown[0] | {"thinking": ""}, *shown[1:]]
    joined = _joined(_events(_stream(_formatter(_reading(), omits=True), _deltas([TEXT]))))
    assert joined["content"] == omitted


def test_signatures_are_those_of_the_cluster_and_of_the_text() -> None:
    def signature(text: str, signer: Signer) -> str:
        found: str = _whole(_formatter(_reading(), signer=signer), _deltas([text]))["content"][0]["signature"]
        return found

    other = Signer(ClusterSecret((b"t" * 32, b"s" * 32)))
    made = [signature(TEXT, each) for each in (SIGNER, other, Signer(None))]
    made.append(signature(TEXT.replace("Hm", "So"), SIGNER))
    assert len(set(made)) == 4
    assert signature(TEXT, Signer(ClusterSecret((b"s" * 32, b"t" * 32)))) == made[0]


def test_short_ids_of_calls_have_the_prefix_too() -> None:
    """Templates of Mistral want nine characters, which they get without it."""
    text = '[TOOL_CALLS]put[ARGS]{"a": 1}'
    [call] = _whole(_formatter(_reading(form=FORMATS["mistral"])), _deltas([text]))["content"]
    assert len(call["id"]) == len("toolu_") + 9


@given(st.integers(0, 40))
def test_a_stream_goes_on_behind_any_of_its_ids(number: int) -> None:
    def numbered(last: str) -> bytes:
        ids = EventIds("0" * 8, 1, parse_event_id(last), can_be_resumed=lambda: True)
        return _stream(_formatter(_reading(), ids=ids), _deltas(_split(TEXT, range(0, 200, 5))))

    events = numbered("").split(b"\n\n")
    named = [index for index, event in enumerate(events) if event.startswith(b"id: ")]
    index = named[number % len(named)]
    last = events[index].split(b"\n")[0].removeprefix(b"id: ").decode()
    assert numbered(last) == b"\n\n".join(events[index + 1 :])


def test_an_error_in_a_stream_has_its_type_and_the_requests_id() -> None:
    failed = _formatter(None).failed(NoWorkers("No worker is ready."))
    assert failed.startswith(b"event: error\ndata: ")
    assert json.loads(failed.split(b"data: ")[1]) == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "No worker is ready."},
        "request_id": "1",
    }


def test_the_end_by_the_context_has_its_own_reason() -> None:
    formatter = _formatter(None)
    fields = request_fields(omits_thinking=False, length_reason="model_context_window_exceeded")
    formatter = MessageFormatter(replace(formatter._request, request_fields=fields), SIGNER)
    assert _whole(formatter, _deltas(["x"], FinishReason.LENGTH))["stop_reason"] == "model_context_window_exceeded"
