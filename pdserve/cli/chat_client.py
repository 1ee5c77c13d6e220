"""Streams one chat completion from the router."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp
from pydantic import BaseModel, ValidationError

from pdserve.base.errors import PdserveError
from pdserve.cli.chat_messages import ChatMessage, ToolCall
from pdserve.cli.repetition import Repetition
from pdserve.cli.router_client import error_message, error_param, unreachable

_CONNECT_TIMEOUT_S = 5.0
_SILENCE_TIMEOUT_S = 300.0


class _FunctionDelta(BaseModel):
    name: str | None = None
    arguments: str | None = None


class _CallDelta(BaseModel):
    index: int = 0
    id: str | None = None
    function: _FunctionDelta = _FunctionDelta()


class _Delta(BaseModel):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_CallDelta] | None = None

    @property
    def thinking(self) -> str:
        """The thinking, which servers send under one of two names, or under both."""
        return self.reasoning or self.reasoning_content or ""


class _Choice(BaseModel):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _TokenUsage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class _CompletionChunk(BaseModel):
    id: str = ""
    choices: list[_Choice] = []
    usage: _TokenUsage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What an event adds to an answer that can be shown at once."""

    thinking: str = ""
    text: str = ""


@dataclass(slots=True)
class Answer:
    """An answer while it arrives. Text that has arrived is kept when the stream is stopped."""

    text: str = ""
    thinking: str = ""
    #: By index.
    calls: dict[int, ToolCall] = field(default_factory=dict)
    request_id: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    started_at: float = field(default_factory=time.monotonic)
    first_at: float | None = None
    last_at: float | None = None
    #: Set when the stream was closed because of it.
    repetition: Repetition | None = None

    def describe(self) -> str:
        """TTFT, speed and request id in one line, as far as they are known."""
        if self.first_at is None or self.last_at is None:
            return "no tokens"
        figures = [f"TTFT {(self.first_at - self.started_at) * 1000:.0f} ms"]
        if self.completion_tokens is not None:
            figures.append(f"{self.completion_tokens} tokens")
            if self.completion_tokens > 1 and self.last_at > self.first_at:
                figures.append(f"{(self.completion_tokens - 1) / (self.last_at - self.first_at):.1f} tokens/s")
        if self.request_id:
            figures.append(f"pdserve trace {self.request_id}")
        return "   ".join(figures)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A router, and the headers that its requests need."""

    base_url: str
    headers: Mapping[str, str] = field(default_factory=dict)


async def stream_answer(
    endpoint: Endpoint, request: Mapping[str, object], messages: Sequence[ChatMessage], answer: Answer
) -> AsyncGenerator[Piece, None]:
    """Yields pieces of text and thinking as they arrive and keeps `answer` up to date, which has the calls, too.

    `request` holds the model and the sampling parameters. Its `max_tokens` is an upper bound: where the context has
    fewer tokens left, the answer may take those. Leaving the iteration closes the connection, which cancels the
    request. Raises `PeerLost` when the router does not answer, and `PdserveError` with its message when it refuses or
    the stream fails.
    """
    body = {
        **request,
        "messages": [message.to_json() for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_SILENCE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=endpoint.headers) as session,
            _open_stream(session, f"{endpoint.base_url}/v1/chat/completions", body) as response,
        ):
            async for line in response.content:
                if piece := _take(line, answer):
                    yield piece
    except (aiohttp.ClientError, OSError) as error:
        raise unreachable(endpoint.base_url, error) from error


@asynccontextmanager
async def _open_stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, object]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """The response to `body`, or to the body without `max_tokens` if the context is too short for that many.

    Raises `PdserveError` when the router refuses.
    """
    async with AsyncExitStack() as stack:
        response = await stack.enter_async_context(session.post(url, json=body))
        if response.status == HTTPStatus.BAD_REQUEST and error_param(await response.read()) == "max_tokens":
            shorter = {name: value for name, value in body.items() if name != "max_tokens"}
            response = await stack.enter_async_context(session.post(url, json=shorter))
        if response.status != HTTPStatus.OK:
            refusal = error_message(await response.read())
            raise PdserveError(refusal or f"The router answered {response.status} {response.reason}.")
        yield response


def _take(line: bytes, answer: Answer) -> Piece | None:
    """Takes one line of the event stream into `answer`; returns what it adds of text and thinking, if anything."""
    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
        return None
    data = line.removeprefix(b"data:")
    if failure := error_message(data):
        raise PdserveError(failure)
    try:
        chunk = _CompletionChunk.model_validate_json(data)
    except ValidationError as error:
        raise PdserveError(f"The stream contains something other than a chat completion: {data[:100]!r}.") from error
    answer.request_id = chunk.id or answer.request_id
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        answer.completion_tokens = chunk.usage.completion_tokens
    answer.finish_reason = next((choice.finish_reason for choice in chunk.choices), None) or answer.finish_reason
    deltas = [choice.delta for choice in chunk.choices]
    return _take_deltas(deltas, answer)


def _take_deltas(deltas: Sequence[_Delta], answer: Answer) -> Piece | None:
    text = "".join(delta.content or "" for delta in deltas)
    thinking = "".join(delta.thinking for delta in deltas)
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    if text or thinking or calls:
        answer.last_at = time.monotonic()
        answer.first_at = answer.first_at or answer.last_at
    answer.text += text
    answer.thinking += thinking
    for each in calls:
        call = answer.calls.setdefault(each.index, ToolCall())
        call.id = each.id or call.id
        call.name += each.function.name or ""
        call.arguments += each.function.arguments or ""
    return Piece(thinking=thinking, text=text) if text or thinking else None


def first_model(models: bytes) -> str:
    """Name of the first model in the answer of `GET /v1/models`. Raises `PdserveError` when there is none."""
    try:
        return str(json.loads(models)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise PdserveError("The router lists no model at /v1/models. Give one with --model.") from error
