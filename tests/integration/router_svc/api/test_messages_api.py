"""The Messages API with Anthropic's client, unmodified, and a model that thinks and calls, whose output is a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.private_redis import PrivateRedis
from router_svc.request import stream
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.integration.router_svc.script import vanish
from tests.support.lazily import anthropic
from tests.support.own_task import in_own_task
from tests.support.tiny_model import END, MAX_POSITIONS, NAME, tokens_of

USER: Any = {"role": "user", "content": "Hi"}
TOOLS: Any = [{"name": "put", "description": "Puts it", "input_schema": {"properties": {"a": {"type": "integer"}}}}]
THOUGHT, CALL = "<think>\nHm.\n</think>\n\n", '<tool_call>\n{"name": "put", "arguments": {"a": 1}}\n</tool_call>'


@asynccontextmanager
async def _client(cluster: ScriptedCluster, **options: Any) -> AsyncIterator[anthropic.AsyncAnthropic]:
    keys = options or {"api_key": "none"}
    async with anthropic.AsyncAnthropic(base_url=cluster.base_url, max_retries=0, timeout=20, **keys) as client:
        yield client


async def _ask(cluster: ScriptedCluster, text: str, **fields: Any) -> tuple[anthropic.types.Message, list[Any]]:
    """The whole message, and the events of a stream, which is the same message."""
    cluster.script.replies = [[*tokens_of(text), END]]
    body = {"model": NAME, "max_tokens": 100, "messages": [USER]} | fields
    async with _client(cluster) as client:
        whole = await client.messages.create(**body)
        async with client.messages.stream(**body) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_message()
    assert _normal(streamed) == _normal(whole)
    return whole, events


def _prompt(cluster: ScriptedCluster) -> bytes:
    """The last prompt without its special tokens."""
    return bytes(token for token in cluster.calls.decode_starts[-1].prompt_token_ids if token < 256)


def _normal(message: anthropic.types.Message) -> Any:
    """A message without what differs between two requests."""
    found = json.loads(message.to_json())
    found = {name: value for name, value in found.items() if value is not None and name not in ("id", "usage")}
    for block in found["content"]:
        block.pop("id", None)
        block.pop("parsed_output", None)
    return found


async def test_thinking_text_and_calls_are_blocks_and_go_back(thinker: ScriptedCluster) -> None:
    thinker.script.cached_tokens = 3
    message, events = await _ask(thinker, THOUGHT + "See." + CALL, tools=TOOLS)
    thinking, text, call = message.content
    assert thinking.type == "thinking"
    assert (thinking.thinking, len(thinking.signature)) == ("Hm.", 44)
    assert text.type == "text"
    assert text.text == "See."
    assert call.type == "tool_use"
    assert (call.name, call.input, call.id[:6]) == ("put", {"a": 1}, "toolu_")
    assert (message.stop_reason, message.stop_sequence, message.model) == ("tool_use", None, NAME)
    pieces = [event.partial_json for event in events if event.type == "input_json"]
    assert "".join(pieces) == '{"a": 1}'
    assert len(pieces) > 3, "arguments come as they are generated"
    prompt = len(thinker.calls.decode_starts[-1].prompt_token_ids)
    assert message.usage.input_tokens == prompt - 3
    assert message.usage.cache_read_input_tokens == 3
    assert events[0].message.usage.input_tokens == prompt - 3, "known from the start"
    assert message.usage.output_tokens_details is not None
    assert message.usage.output_tokens_details.thinking_tokens == len(">\nHm.\n</think>")
    # Back it goes, with the result.
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Done", "is_error": True}
    conversation = [USER, message.to_param(), {"role": "user", "content": [result]}]
    answer, _ = await _ask(thinker, "Good.", tools=TOOLS, messages=conversation)
    assert answer.stop_reason == "end_turn"
    assert _prompt(thinker).endswith(b"<|im_start|>tool\nError: Done<|im_start|>assistant\n")
    messages = [USER, {"role": "assistant", "content": "The best answer is ("}]
    goes_on, _ = await _ask(thinker, "B)", messages=messages)
    assert goes_on.content[0].text == "B)"  # type: ignore[union-attr]
    assert _prompt(thinker).endswith(b"assistant\nThe best answer is (")


async def test_reasons_of_the_end_and_thinking_turned_off_or_left_out(thinker: ScriptedCluster) -> None:
    for text, fields, reason, content in (
        ("Hello.", {}, ("end_turn", None), "Hello."),
        ("Hello.", {"max_tokens": 3}, ("max_tokens", None), "Hel"),
        ("Hello.", {"stop_sequences": ["xyz", "lo"]}, ("stop_sequence", "lo"), "Hel"),
        ("x" * MAX_POSITIONS, {"max_tokens": 64_000}, ("model_context_window_exceeded", None), None),
        ("", {}, ("end_turn", None), ""),
    ):
        message, _ = await _ask(thinker, text, **fields)
        assert (message.stop_reason, message.stop_sequence) == reason
        [block] = message.content
        assert block.type == "text"
        assert content is None or block.text == content
    for thinking, kinds, text in (
        ({"type": "disabled"}, ["text"], None),
        ({"type": "enabled", "budget_tokens": 1024}, ["thinking", "text"], "Hm."),
        ({"type": "adaptive", "display": "omitted"}, ["thinking", "text"], ""),
    ):
        message, _ = await _ask(thinker, ("" if text is None else THOUGHT) + "Hello.", thinking=thinking)
        assert [block.type for block in message.content] == kinds
        assert [block.thinking for block in message.content if block.type == "thinking"] == [text] * (len(kinds) - 1)
        assert _prompt(thinker).endswith(b"</think>\n\n") == (text is None)


async def test_choices_of_tools_and_structured_output_are_grammars(thinker: ScriptedCluster) -> None:
    for choice, is_required, is_parallel in (
        ({"type": "auto"}, False, True),
        ({"type": "any"}, True, True),
        ({"type": "any", "disable_parallel_tool_use": True}, True, False),
        ({"type": "tool", "name": "put"}, True, False),
        ({"type": "none"}, None, None),
    ):
        called = is_required is not None
        message, _ = await _ask(thinker, CALL if called else "Hello.", tools=TOOLS, tool_choice=choice)
        assert message.stop_reason == ("tool_use" if called else "end_turn")
        lark = json.loads(thinker.calls.decode_starts[-1].sampling.grammar)["grammars"][0]["lark_grammar"]
        assert ("tool:" in lark) == called
        start = lark.split("\n")[1]
        if called:
            assert ("TEXT" in start) == (not is_required)
            assert (")*" in start) == is_parallel
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form: Any = {"format": {"type": "json_schema", "schema": schema}}
    # Structured output is one, too, behind the thinking.
    await _ask(thinker, '{"a": 1}', output_config=form)
    grammar = thinker.calls.decode_starts[-1].sampling.grammar
    assert "json_schema" in grammar
    assert "</think>" in grammar


async def test_what_claude_code_sends_is_taken_and_named_in_a_header(thinker: ScriptedCluster) -> None:
    """Beta fields and queries (claude-code#21612, #51700), and a billing line (vllm#36829)."""
    prompts = []
    for cch in ("eb6c6", "71fea"):
        body = {
            "model": NAME,
            "max_tokens": 32_000,
            "stream": True,
            "system": [
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.100.7b4; cch={cch};"},
                {"type": "text", "text": "You are a tool.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": None}]}],
            "metadata": {"user_id": "user_1"},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,context-management"}
        async with thinker.http.post(
            f"{thinker.base_url}/v1/messages?beta=true", json=body, headers=headers
        ) as response:
            assert response.status == 200
            assert response.headers["Pdserve-Ignored-Fields"] == "context_management"
            assert (await response.text()).endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
        prompts.append([*thinker.calls.decode_starts[-1].prompt_token_ids])
    assert prompts[0] == prompts[1]


async def test_counted_tokens_are_those_of_the_real_call(thinker: ScriptedCluster) -> None:
    thinker.script.cached_tokens = 3
    messages = [USER, {"role": "assistant", "content": "A"}, {"role": "user", "content": "é?"}]
    more: tuple[dict[str, Any], ...] = ({}, {"tools": TOOLS}, {"system": "S", "thinking": {"type": "disabled"}})
    for fields in ({"messages": messages} | each for each in more):
        before = len(thinker.calls.decode_starts)
        async with _client(thinker) as client:
            counted = await client.messages.count_tokens(model=NAME, **fields)
        assert len(thinker.calls.decode_starts) == before, "no worker is needed"
        usage = (await _ask(thinker, "Hello.", **fields))[0].usage
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        assert counted.input_tokens == len(thinker.calls.decode_starts[-1].prompt_token_ids)


async def test_a_key_comes_in_either_header(redis_server: PrivateRedis, model_dir: Path) -> None:
    """vLLM reads only one of them: unsloth#8663, free-claude-code#902."""
    async with in_own_task(open_cluster(redis_server, model_dir, ONE_OF_EACH, api_key=("root",))) as locked:
        for options in ({"api_key": "root"}, {"auth_token": "root"}):
            async with _client(locked, **options) as client:
                message = await client.messages.create(model=NAME, max_tokens=50, messages=[USER])
                assert message.content[0].text == "Hello world."  # type: ignore[union-attr]
        async with _client(locked, api_key="other") as client:
            with pytest.raises(anthropic.AuthenticationError) as raised:
                await client.messages.count_tokens(model=NAME, messages=[USER])
            assert raised.value.type == "authentication_error"
        body = {"model": NAME, "messages": [USER]}
        both = {"x-api-key": "root", "Authorization": "Bearer root"}
        assert (await locked.post("/v1/messages/count_tokens", body, headers=both))[0] == 200


async def test_errors_have_the_classes_of_the_client(thinker: ScriptedCluster) -> None:
    from anthropic._exceptions import OverloadedError

    body: Any = {"model": NAME, "max_tokens": 50, "messages": [USER]}
    cannot: Any = {"type": "object", "properties": {"a": {"not": {}}}}
    tool = {"name": "f", "strict": True, "input_schema": cannot}
    refused: tuple[tuple[Any, str], ...] = (
        ({"messages": [USER | {"content": "Hi" * 300}]}, r"prompt is too long: \d+ tokens > 256 maximum"),
        ({"tools": [tool]}, r"tools\[0\]\.input_schema\.properties\.a"),
        ({"output_config": {"format": {"type": "json_schema", "schema": cannot}}}, r"`output_config\.format\.schema\."),
    )
    async with _client(thinker) as client:
        for fields, words in refused:
            with pytest.raises(anthropic.BadRequestError, match=words):
                await client.messages.create(**body | fields)
        image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        with pytest.raises(anthropic.BadRequestError, match="images, documents"):
            await client.messages.create(**body | {"messages": [{"role": "user", "content": [image]}]})
        with pytest.raises(anthropic.BadRequestError, match="`max_tokens` is required"):
            await client.messages.create(model=NAME, messages=[USER], max_tokens=anthropic.omit)  # type: ignore[arg-type]
        thinker.router.models.first.requests.drain()
        with pytest.raises(OverloadedError) as raised:
            await client.messages.create(**body)
        assert (raised.value.status_code, raised.value.type) == (529, "overloaded_error")


async def test_ids_are_those_of_the_request_and_an_error_within_a_stream_is_an_event(thinker: ScriptedCluster) -> None:
    body: Any = {"model": NAME, "max_tokens": 50, "messages": [USER], "extra_headers": {"X-Request-Id": "mine"}}
    async with _client(thinker) as client:
        message = await client.messages.create(**body)
        assert (message.id, message._request_id) == ("msg_mine", "mine")
        assert (await thinker.trace("msg_mine"))["endpoint"] == "/v1/messages"
        with pytest.raises(anthropic.NotFoundError) as raised:
            await client.messages.create(**body | {"model": "claude-next"})
        assert raised.value.type == "not_found_error"
        # With one token and no other, until the request is cancelled.
        thinker.script.pace = asyncio.Semaphore(0)
        stream: Any = await client.messages.create(**body, stream=True)
        assert (await anext(stream)).message.id == "msg_mine"
        assert await thinker.post("/v1/requests/msg_mine/cancel") == (200, {"id": "msg_mine", "status": "cancelled"})
        with pytest.raises(anthropic.APIStatusError, match="cancelled") as ended:
            [event async for event in stream]
    assert ended.value.type == "invalid_request_error"
    thinker.script.pace = None


async def test_a_lost_worker_is_not_seen_in_a_stream(cluster: ScriptedCluster) -> None:
    undisturbed, _ = await _ask(cluster, "Hello world.")
    starts = len(cluster.calls.decode_starts)
    cluster.script.fail("decode_token", None, None, None, vanish)
    body: Any = {"model": NAME, "max_tokens": 100, "messages": [USER]}
    async with _client(cluster) as client, client.messages.stream(**body) as stream:
        disturbed = await stream.get_final_message()
    assert _normal(disturbed) == _normal(undisturbed)
    assert len(cluster.calls.decode_starts) == starts + 2, "a worker was lost"


async def test_pings_keep_a_stream_open(thinker: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.01)
    thinker.script.pace = pace = asyncio.Semaphore(0)
    thinker.script.replies = [[*tokens_of("Hi"), END]]
    body = {"model": NAME, "max_tokens": 50, "messages": [USER], "stream": True}
    async with thinker.http.post(f"{thinker.base_url}/v1/messages", json=body) as response:
        sent = b""
        while sent.count(b'event: ping\ndata: {"type":"ping"}\n\n') < 3:
            sent += await response.content.readany()
        for _ in range(3):
            pace.release()
        sent += await response.read()
    assert sent.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')
