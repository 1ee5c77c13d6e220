"""The event loop of the router goes on whatever one client sends: its longest callback is short.

Measured in the loop's own processor time, which other processes and threads do not lengthen.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import grpc
import pytest

from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.support.callbacks import LIMIT_S, Longest, longest_callback
from tests.support.tiny_model import NAME

Result = TypeVar("Result")

MAX_BODY = 8 * 1024**2
#: Clients that stream meanwhile, and the pause of each between two streams.
NUM_STREAMS, THINK_S = 3, 0.2
USER = {"role": "user", "content": "x"}
COMPLETION: dict[str, Any] = {"model": NAME, "prompt": "x", "max_tokens": 50}
CHAT: dict[str, Any] = {"model": NAME, "messages": [USER], "max_tokens": 8}


def fill(head: bytes, piece: bytes, tail: bytes, size: int = MAX_BODY) -> bytes:
    """A body of nearly this size."""
    return head + piece * ((size - len(head) - len(tail)) // len(piece)) + tail


def body(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields).encode()


PROMPT = b'{"model": "%b", "prompt": ' % NAME.encode()
BLOCKS = b'{"model":"%b","max_tokens":8,"messages":[{"role":"user","content":[' % NAME.encode()
LAST_BLOCK = b'{"type":"text","text":""}]}]}'
ITEMS: dict[str, Any] = {"model": NAME, "max_output_tokens": 8}
ITEM = b'{"model":"%b","input":[{"role":"user","content":[' % NAME.encode()
LAST_TEXT = b'{"type":"input_text","text":""}]}]}'
EMBEDDING: dict[str, Any] = {"model": NAME}
CALL = {"type": "function_call", "call_id": "1", "name": "put", "arguments": '{"a": [1, 2, 3]}'}
TOOL = {"type": "function", "name": "put", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}
KEYS = {f"key{index}": 1 for index in range(290)}
#: Path, body, and the status of its answer.
WORST: dict[str, tuple[str, bytes, int]] = {
    "text": ("/v1/completions", fill(PROMPT + b'"', b"a b ", b'"}'), 400),
    "escapes": ("/v1/completions", fill(PROMPT + b'"', b"\\u00e9", b'"}'), 400),
    "texts": ("/v1/completions", body(COMPLETION | {"prompt": ["a" * 99_000] * 84}), 400),
    "many texts": ("/v1/completions", body(COMPLETION | {"prompt": ["a" * 200] * 512, "max_tokens": 1}), 200),
    "many ids": ("/v1/completions", body(COMPLETION | {"prompt": [[1] * 250] * 512, "max_tokens": 1}), 200),
    "many inputs": ("/v1/embeddings", body(EMBEDDING | {"input": ["a" * 100] * 2048}), 200),
    "encoded inputs": (
        "/v1/embeddings",
        body(EMBEDDING | {"input": [[1] * 140] * 2048, "encoding_format": "base64"}),
        200,
    ),
    "token ids": ("/v1/completions", fill(PROMPT + b"[", b"1,", b"1]}", 2_300_000), 400),
    "values": ("/v1/completions", fill(PROMPT + b"[", b"1,", b"1]}"), 413),
    "lists": ("/v1/completions", fill(PROMPT + b"[", b"[],", b"[]]}"), 413),
    "objects": ("/v1/completions", fill(PROMPT + b"[", b"{},", b"{}]}", 150_000), 400),
    "options": ("/v1/completions", body(COMPLETION | {"stream": True, "stream_options": KEYS}), 400),
    "log-probabilities": ("/v1/completions", body(COMPLETION | {"n": 48, "logprobs": 20}), 200),
    "streamed log-probabilities": (
        "/v1/completions",
        body(COMPLETION | {"n": 48, "logprobs": 20, "stream": True}),
        200,
    ),
    "echo": ("/v1/completions", body(COMPLETION | {"prompt": "a" * 200, "n": 128, "echo": True, "max_tokens": 1}), 200),
    "content": ("/v1/chat/completions", body(CHAT | {"messages": [{"role": "user", "content": "a b " * 2**21}]}), 413),
    "messages": ("/v1/chat/completions", body(CHAT | {"messages": [USER] * 4096}), 400),
    "few messages": ("/v1/chat/completions", body(CHAT | {"messages": [USER] * 1500}), 400),
    "fields": ("/v1/chat/completions", body(CHAT | {"messages": [USER | KEYS] * 200}), 400),
    "kwargs": (
        "/v1/chat/completions",
        body(CHAT | {"chat_template_kwargs": {f"mood{index}" * 20: "x" * 4096 for index in range(16)}}),
        200,
    ),
    "printed kwargs": ("/v1/chat/completions", body(CHAT | {"chat_template_kwargs": {"mood": "a b " * 1024}}), 400),
    "few blocks": ("/v1/messages", fill(BLOCKS, b'{"type":"text","text":""},', LAST_BLOCK, 16 * 1024), 400),
    "some blocks": ("/v1/messages", fill(BLOCKS, b'{"type":"text","text":""},', LAST_BLOCK, 32 * 1024), 400),
    "blocks": ("/v1/messages", fill(BLOCKS, b'{"type":"text","text":""},', LAST_BLOCK, 64 * 1024), 400),
    "many blocks": ("/v1/messages", fill(BLOCKS, b'{"type":"text","text":""},', LAST_BLOCK, 500_000), 400),
    "turns": ("/v1/messages", body(CHAT | {"messages": [USER, USER | {"role": "assistant"}] * 2000}), 400),
    "unknown fields": ("/v1/messages/count_tokens", body(CHAT | {"messages": [USER | KEYS] * 200}), 200),
    "items": ("/v1/responses", body(ITEMS | {"input": [USER] * 4096}), 400),
    "content of an item": ("/v1/responses", fill(ITEM, b'{"type":"input_text","text":""},', LAST_TEXT, 500_000), 400),
    "calls": ("/v1/responses", body(ITEMS | {"input": [CALL] * 4096}), 400),
    "tools": ("/v1/responses", body(ITEMS | {"input": "x", "tools": [TOOL] * 200}), 400),
    "tokenize": ("/tokenize", fill(b'{"prompt": "', b"a b ", b'", "return_token_strs": true}', 100_000), 200),
    "tokenize all": ("/tokenize", fill(b'{"prompt": "', b"a b ", b'"}'), 400),
    "detokenize": ("/detokenize", fill(b'{"tokens": [', b"1,", b"1]}", 2_300_000), 413),
}


def by_grpc() -> dict[str, pb.GenerateRequest]:
    """Messages of gRPC. Made by the test: they take most of a second."""
    return {
        "text": pb.GenerateRequest(model=NAME, text="a b " * (2**21 - 100)),
        "token ids": pb.GenerateRequest(model=NAME, token_ids=pb.TokenIds(ids=[1] * 8_000_000)),
        "biases": pb.GenerateRequest(
            model=NAME, text="x", sampling=pb.ClientSampling(logit_bias=dict.fromkeys(range(400_000), 1.0))
        ),
        "log-probabilities": pb.GenerateRequest(
            model=NAME, text="x", sampling=pb.ClientSampling(n=48, max_tokens=50, logprobs=20)
        ),
    }


def post(base_url: str, path: str, data: bytes) -> int:
    """The status of the answer, which is read to its end. Runs in a thread: the client's own work is not measured."""
    connection = http.client.HTTPConnection(base_url.removeprefix("http://"), timeout=120)
    try:
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def generate(address: str, message: pb.GenerateRequest) -> str:
    """The name of the call's status."""
    with grpc.insecure_channel(address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(message)
        with contextlib.suppress(grpc.RpcError):
            for _ in call:
                pass
        return str(call.code().name)


async def sent(send: Callable[[], Result]) -> tuple[Result, Longest]:
    """What a thread gets for a request, and the longest callback meanwhile."""
    results: list[Result] = []

    async def run() -> None:
        results.append(await asyncio.to_thread(send))

    longest = await longest_callback(run)
    return results[-1], longest


@pytest.mark.slow
async def test_no_legal_body_holds_the_event_loop(cluster: ScriptedCluster) -> None:
    found: dict[str, str] = {}
    statuses: dict[str, int] = {}
    codes: dict[str, str] = {}
    stop = asyncio.Event()

    async def stream() -> None:
        while not stop.is_set():
            await cluster.stream()
            # A client that reads an answer sends nothing. Without the pause, streams take half of the test's time.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), THINK_S)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_STREAMS):
            group.create_task(stream())
        for name, (path, data, _) in WORST.items():
            statuses[name], longest = await sent(partial(post, cluster.base_url, path, data))
            if longest.seconds > LIMIT_S:
                found[name] = f"{longest.seconds * 1e3:.0f} ms in {longest.callback}"
        for name, message in by_grpc().items():
            codes[name], longest = await sent(partial(generate, cluster.grpc_address, message))
            if longest.seconds > LIMIT_S:
                found[f"gRPC {name}"] = f"{longest.seconds * 1e3:.0f} ms in {longest.callback}"
        stop.set()
    assert statuses == {name: status for name, (_, _, status) in WORST.items()}
    assert set(codes.values()) <= {"INVALID_ARGUMENT", "OK", "RESOURCE_EXHAUSTED"}
    assert found == {}
