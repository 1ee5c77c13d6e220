"""Ollama's API with Ollama's client, unmodified, and a model that thinks and calls, whose output is a script."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import pdserve
from pdserve.cli.private_redis import PrivateRedis
from router_svc.request import stream
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.support.lazily import ollama
from tests.support.own_task import in_own_task
from tests.support.tiny_model import END, MAX_POSITIONS, NAME, tokens_of

USER: Any = {"role": "user", "content": "Hi"}
PUT: Any = {"name": "put", "description": "Puts it", "parameters": {"properties": {"a": {"type": "integer"}}}}
TOOLS: Any = [{"type": "function", "function": PUT}]
THOUGHT, CALL = "<think>\nHm.\n</think>\n\n", '<tool_call>\n{"name": "put", "arguments": {"a":\n 1}}\n</tool_call>'


@asynccontextmanager
async def _client(cluster: ScriptedCluster, **headers: str) -> AsyncIterator[ollama.AsyncClient]:
    async with ollama.AsyncClient(host=cluster.base_url, headers=headers, timeout=20) as client:
        yield client


async def _ask(cluster: ScriptedCluster, text: str, **fields: Any) -> ollama.ChatResponse:
    """The whole answer to a chat, which the stream has, too."""
    cluster.script.replies = [[*tokens_of(text), END]]
    body = {"model": NAME, "messages": [USER]} | fields
    async with _client(cluster) as client:
        whole = await client.chat(**body)
        pieces = [piece async for piece in await client.chat(**body, stream=True)]
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    messages = [piece.message for piece in pieces]
    assert "".join(each.content or "" for each in messages) == whole.message.content
    assert "".join(each.thinking or "" for each in messages) == (whole.message.thinking or "")
    assert [call for each in messages for call in each.tool_calls or ()] == [*(whole.message.tool_calls or ())]
    for name in ("model", "done_reason", "prompt_eval_count", "eval_count"):
        assert pieces[-1][name] == whole[name]
    return whole


def _prompt(cluster: ScriptedCluster) -> bytes:
    """The last prompt without its special tokens."""
    return bytes(token for token in cluster.calls.decode_starts[-1].prompt_token_ids if token < 256)


async def test_thinking_text_and_calls_come_and_go_back(thinker: ScriptedCluster) -> None:
    answer = await _ask(thinker, THOUGHT + "S\u2028\x85ee." + CALL + CALL, tools=TOOLS)
    message = answer.message
    assert (message.role, message.thinking, message.content) == ("assistant", "Hm.", "S\u2028\x85ee.")
    assert [(call.function.name, call.function.arguments) for call in message.tool_calls or ()] == [
        ("put", {"a": 1})
    ] * 2
    assert (answer.model, answer.done, answer.done_reason) == (NAME, True, "stop")
    assert answer.prompt_eval_count == len(thinker.calls.decode_starts[-1].prompt_token_ids)
    assert answer.eval_count == len(thinker.script.replies[0])
    total, *rest = (answer.total_duration, answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
    assert total == sum(rest)  # type: ignore[arg-type]
    assert answer.created_at is not None
    assert datetime.fromisoformat(answer.created_at).utcoffset() is not None
    # Back it goes, with a result.
    conversation = [USER, message, {"role": "tool", "tool_name": "put", "content": "Done"}]
    await _ask(thinker, "Good.", tools=TOOLS, messages=conversation)
    assert _prompt(thinker).endswith(
        b"<|im_start|>assistant\nS\xe2\x80\xa8\xc2\x85ee.Hm.<|im_start|>tool\nDone<|im_start|>assistant\n"
    )
    goes_on = await _ask(thinker, "B)", messages=[USER, {"role": "assistant", "content": "The answer is ("}])
    assert goes_on.message.content == "B)"
    assert _prompt(thinker).endswith(b"assistant\nThe answer is (")


async def test_reasons_of_the_end_options_and_thinking(thinker: ScriptedCluster) -> None:
    for text, options, reason, content in (
        ("Hello.", {}, "stop", "Hello."),
        ("Hello.", {"num_predict": 3}, "length", "Hel"),
        ("Hello.", {"num_predict": -1, "stop": ["xyz", "lo"]}, "stop", "Hel"),
        ("x" * MAX_POSITIONS, {"num_predict": 64_000}, "length", None),
        ("", {}, "stop", ""),
    ):
        answer = await _ask(thinker, text, options=options)
        assert answer.done_reason == reason
        assert content is None or answer.message.content == content
    options = {"temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.25, "seed": 7, "repeat_penalty": 1.5}
    await _ask(thinker, "Hello.", options=options | {"presence_penalty": 0.5, "frequency_penalty": -0.5})
    sampling = thinker.calls.decode_starts[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.5, 0.25)
    assert (sampling.seed, sampling.repetition_penalty) == (7, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    for think, thinking in ((False, None), (True, "Hm."), ("low", "Hm.")):
        answer = await _ask(thinker, ("" if think is False else THOUGHT) + "Hello.", think=think)
        assert answer.message.thinking == thinking
        assert _prompt(thinker).endswith(b"</think>\n\n") == (think is False)


async def test_generate_answers_a_prompt_in_the_template_and_a_raw_one_without(thinker: ScriptedCluster) -> None:
    thinker.script.replies = [[*tokens_of(THOUGHT + "Hello."), END]]
    async with _client(thinker) as client:
        whole = await client.generate(NAME, "Hi", system="S")
        assert (whole.response, whole.thinking, whole.done_reason) == ("Hello.", "Hm.", "stop")
        assert _prompt(thinker) == b"<|im_start|>system\nS<|im_start|>user\nHi<|im_start|>assistant\n"
        pieces = [piece async for piece in await client.generate(NAME, "Hi", system="S", stream=True)]
        assert "".join(piece.response or "" for piece in pieces) == "Hello."
        assert "".join(piece.thinking or "" for piece in pieces) == "Hm."
        raw = await client.generate(NAME, "Hi", raw=True)
        assert (raw.response, raw.thinking) == (THOUGHT + "Hello.", None)
        assert _prompt(thinker) == b"Hi"
        assert raw.eval_count == len(THOUGHT + "Hello.") + 1, "as many as the context has, not 16"


async def test_a_format_is_a_grammar_behind_the_thinking(thinker: ScriptedCluster) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for form in ("json", schema):
        await _ask(thinker, THOUGHT + '{"a": 1}', format=form)
        grammar = thinker.calls.decode_starts[-1].sampling.grammar
        assert "json_schema" in grammar
        assert "</think>" in grammar
        assert ('"integer"' in grammar) == (form is schema)
    await _ask(thinker, "Hello.", format="")
    assert not thinker.calls.decode_starts[-1].sampling.grammar


async def test_names_may_have_the_tag_latest_and_others_are_404(thinker: ScriptedCluster) -> None:
    assert (await _ask(thinker, "Hello.", model=f"{NAME}:latest")).model == NAME
    async with _client(thinker) as client:
        for name in (f"{NAME}:8b", "llama3.2", f"{NAME}:latest:latest"):
            for call in (client.chat(name, [USER]), client.generate(name, "Hi"), client.show(name)):
                with pytest.raises(ollama.ResponseError, match=f"does not exist. This server has `{NAME}`") as raised:
                    await call
                assert raised.value.status_code == 404
        assert (await client.show(f"{NAME}:latest")).capabilities == ["completion", "tools", "thinking"]


async def test_what_does_nothing_here_is_named_in_a_header(thinker: ScriptedCluster) -> None:
    thinker.script.replies = [[*tokens_of("Hello."), END]]
    message = USER | {"audio": 1}
    body = {"model": NAME, "messages": [message], "keep_alive": "5m", "options": {"num_ctx": 4096, "num_thread": 2}}
    async with thinker.http.post(f"{thinker.base_url}/api/chat", json=body) as response:
        assert response.status == 200
        assert response.content_type == "application/x-ndjson"
        ignored = response.headers["Pdserve-Ignored-Fields"]
        assert {*ignored.split(", ")} == {"keep_alive", "messages[].audio", "options.num_ctx", "options.num_thread"}
        lines = (await response.read()).splitlines()
    assert "".join(json.loads(line)["message"]["content"] for line in lines) == "Hello."
    prompt = {"model": NAME, "prompt": "Hi", "raw": True, "think": True, "stream": False}
    async with thinker.http.post(f"{thinker.base_url}/api/generate", json=prompt) as response:
        assert (response.status, response.content_type) == (200, "application/json")
        assert response.headers["Pdserve-Ignored-Fields"] == "think"


async def test_facts_of_the_model_are_those_of_its_files_and_workers(small_cluster: ScriptedCluster) -> None:
    cluster = small_cluster
    async with _client(cluster) as client:
        [model] = (await client.list()).models
        shown, [running] = await client.show(NAME), (await client.ps()).models
    config = json.loads((cluster.router.config.models[NAME] / "config.json").read_bytes())
    assert (model.model, running.model, running.name) == (NAME, NAME, NAME)
    [worker, *_] = cluster.router.cluster.ready("decode")
    assert model.digest == running.digest == worker.layout.model
    assert model.size is None, "the router has no weights"
    assert running.context_length == worker.max_model_len
    assert shown.details == model.details == running.details
    assert shown.details is not None
    assert (shown.details.family, shown.details.format, shown.details.quantization_level) == (
        "llama",
        "safetensors",
        "F32",
    )
    info = shown.modelinfo
    assert info is not None
    assert info["general.architecture"] == "llama"
    assert info["llama.context_length"] == config["max_position_embeddings"]
    assert info["llama.block_count"] == config["num_hidden_layers"]
    assert shown.details.parameter_size == f"{info['general.parameter_count'] / 1000:.0f}K"
    assert shown.template == (cluster.router.config.models[NAME] / "chat_template.jinja").read_text()
    assert shown.capabilities == ["completion", "tools"]
    assert (await cluster.get("/api/version")) == (200, {"version": pdserve.__version__})
    assert model.modified_at is not None
    async with _client(cluster) as client:
        with pytest.raises(ollama.ResponseError, match=f"`think` is true, but the model `{NAME}` does not think"):
            await client.chat(NAME, [USER], think=True)
        with pytest.raises(ollama.ResponseError, match="`think` is low"):
            await client.generate(NAME, "Hi", think="low")
        assert (await client.chat(NAME, [USER], think=False)).message.content == "Hello world."


async def test_a_model_without_workers_is_not_running_and_has_no_digest(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with in_own_task(open_cluster(redis_server, model_dir, {})) as empty:
        assert (await empty.get("/api/ps")) == (200, {"models": []})
        [model] = (await empty.get("/api/tags"))[1]["models"]
        assert "digest" not in model


async def test_errors_are_those_of_the_client(thinker: ScriptedCluster) -> None:
    cannot: Any = {"type": "object", "properties": {"a": {"not": {}}}}
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"messages": [USER | {"content": "Hi" * 300}]}, r"The prompt has \d+ tokens"),
        ({"format": cannot}, r"`format\.properties\.a"),
        ({"messages": []}, "`messages`"),
        ({"options": {"temperature": 9}}, r"`options\.temperature`.*\(got 9\)"),
        ({"messages": [USER | {"images": [b"abc"]}]}, "models here read text"),
    )
    async with _client(thinker) as client:
        for fields, words in refused:
            with pytest.raises(ollama.ResponseError, match=words) as raised:
                await client.chat(**{"model": NAME, "messages": [USER]} | fields)
            assert raised.value.status_code == 400
            assert raised.value.error.endswith("."), "the text alone, not its JSON"
        for fields, words in (({"template": "x"}, "`template`"), ({"suffix": "x"}, "`suffix`")):
            with pytest.raises(ollama.ResponseError, match=words):
                await client.generate(NAME, "Hi", **fields)
        for call in (client.pull("other"), client.push(NAME), client.create("new", from_=NAME), client.delete(NAME)):
            with pytest.raises(ollama.ResponseError, match="pdserve up MODEL") as raised:
                await call
            assert raised.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match=r"^The path /api/other does not exist\. \(status code: 404\)"):
            await client._request(ollama.StatusResponse, "GET", "/api/other")
        thinker.router.models.first.requests.drain()
        with pytest.raises(ollama.ResponseError) as raised:
            await client.chat(NAME, [USER])
        assert raised.value.status_code == 503


async def test_an_error_within_a_stream_is_its_last_line(thinker: ScriptedCluster) -> None:
    # With one token and no other, until the request is cancelled.
    thinker.script.pace = asyncio.Semaphore(0)
    async with _client(thinker, **{"X-Request-Id": "mine"}) as client:
        pieces = await client.chat(NAME, [USER], stream=True)
        assert (await anext(pieces)).message.content
        assert await thinker.post("/v1/requests/mine/cancel") == (200, {"id": "mine", "status": "cancelled"})
        with pytest.raises(ollama.ResponseError, match="cancelled"):
            [piece async for piece in pieces]
    thinker.script.pace = None
    assert (await thinker.trace("mine"))["endpoint"] == "/api/chat"


@pytest.fixture
async def locked(redis_server: PrivateRedis, model_dir: Path) -> AsyncIterator[ScriptedCluster]:
    """A router that asks for the key `root`, and whose streams can be resumed."""
    opened = open_cluster(redis_server, model_dir, ONE_OF_EACH, api_key=("root",), resume_timeout_s=60.0)
    async with in_own_task(opened) as cluster:
        yield cluster


async def test_every_path_needs_a_key_and_a_stream_has_no_comments_and_cannot_be_resumed(
    locked: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _client(locked) as client:
        for call in (client.chat(NAME, [USER]), client.list(), client.ps(), client.show(NAME), client.pull("x")):
            with pytest.raises(ollama.ResponseError, match="key") as raised:
                await call
            assert raised.value.status_code == 401
    assert (await locked.get("/api/version"))[0] == 401
    key = {"Authorization": "Bearer root"}
    async with _client(locked, **key) as client:
        assert (await client.list()).models[0].model == NAME
    monkeypatch.setattr(stream, "KEEP_ALIVE_S", 0.01)
    locked.script.pace = pace = asyncio.Semaphore(0)
    body, url = {"model": NAME, "messages": [USER]}, locked.base_url
    # The other stream shows that time enough has gone for comments.
    async with (
        locked.http.post(f"{url}/api/chat", json=body, headers=key | {"X-Request-Id": "mine"}) as lines,
        locked.http.post(f"{url}/v1/chat/completions", json=body | {"stream": True}, headers=key) as events,
    ):
        sent = b""
        while sent.count(b": the next token") < 3:
            sent += await events.content.readany()
        for _ in range(100):
            pace.release()
        await events.read()
        received = await lines.read()
    assert [json.loads(line)["done"] for line in received.splitlines()][-1] is True
    async with locked.http.get(f"{url}/v1/requests/mine/stream", headers=key) as resumed:
        assert resumed.status == 404


async def test_texts_have_embeddings_of_length_one_and_in_the_older_form_of_their_own(
    small_cluster: ScriptedCluster,
) -> None:
    async with _client(small_cluster) as client:
        answer = await client.embed(NAME, ["abc", "b" * 300], dimensions=4)
        whole = await client.embed(f"{NAME}:latest", "abc")
        older = await client.embeddings(NAME, "abc")
        for call in (client.embed(NAME, "b" * 300, truncate=False), client.embed(NAME, "abc", dimensions=17)):
            with pytest.raises(ollama.ResponseError) as raised:
                await call
            assert raised.value.status_code == 400
    assert answer.embeddings == [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0]]  # Of the last tokens: c and b.
    assert (answer.prompt_eval_count, answer.model, answer.load_duration) == (3 + 255, NAME, 0)
    assert answer.total_duration
    assert len(whole.embeddings[0]) == len(older.embedding) == 16
    requests = [*small_cluster.calls.prefills]
    assert [request.pooling.normalizes for request in requests[-2:]] == [True, False]
    assert bytes(requests[1].prompt_token_ids) == b"b" * 255
    assert not small_cluster.calls.decode_starts


async def test_log_probabilities_are_those_of_chats(thinker: ScriptedCluster) -> None:
    async with _client(thinker) as client:
        whole = await client.chat(NAME, [USER], logprobs=True, top_logprobs=2)
        lines = [each async for each in await client.chat(NAME, [USER], logprobs=True, top_logprobs=2, stream=True)]
        text = await client.generate(NAME, "Hi", raw=True, logprobs=True)
        none = await client.generate(NAME, "Hi", top_logprobs=2)
    body = {"model": NAME, "messages": [USER], "logprobs": True, "top_logprobs": 2}
    expected = (await thinker.post("/v1/chat/completions", body))[1]["choices"][0]["logprobs"]["content"]
    assert whole.logprobs is not None
    assert [(each.token, each.logprob) for each in whole.logprobs] == [
        (each["token"], each["logprob"]) for each in expected
    ]
    assert [each for line in lines for each in line.logprobs or ()] == [*whole.logprobs]
    assert whole.logprobs[0].top_logprobs
    assert text.logprobs is not None
    assert none.logprobs is None


async def test_a_client_finds_the_server_without_a_key(locked: ScriptedCluster) -> None:
    async with locked.http.get(f"{locked.base_url}/") as answer:
        assert (answer.status, await answer.text()) == (200, "Ollama is running")
    async with locked.http.head(f"{locked.base_url}/") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
