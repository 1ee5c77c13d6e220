"""Streams one chat completion from the router."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
from pydantic import BaseModel, ValidationError

from pdserve.base.errors import PdserveError
from pdserve.cli.router_client import error_message, unreachable

_CONNECT_TIMEOUT_S = 5.0
_SILENCE_TIMEOUT_S = 300.0


class _Delta(BaseModel):
    content: str | None = None


class _Choice(BaseModel):
    delta: _Delta = _Delta()
    finish_reason: str | None = None


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(BaseModel):
    id: str = ""
    choices: list[_Choice] = []
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of the conversation."""

    role: str
    content: str


@dataclass(slots=True)
class Answer:
    """An answer while it arrives; what has arrived stays when the stream is stopped."""

    text: str = ""
    request_id: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    started_at: float = field(default_factory=time.monotonic)
    first_at: float | None = None
    last_at: float | None = None

    def describe(self) -> str:
        """TTFT and speed in one line, as far as they are known."""
        if self.first_at is None or self.last_at is None:
            return "no tokens"
        parts = [f"TTFT {(self.first_at - self.started_at) * 1000:.0f} ms"]
        if self.completion_tokens is not None:
            parts.append(f"{self.completion_tokens} tokens")
            if self.completion_tokens > 1 and self.last_at > self.first_at:
                parts.append(f"{(self.completion_tokens - 1) / (self.last_at - self.first_at):.1f} tokens/s")
        if self.request_id:
            parts.append(f"pdserve trace {self.request_id}")
        return "   ".join(parts)


async def stream_answer(
    base_url: str, request: Mapping[str, object], messages: Sequence[Message], answer: Answer
) -> AsyncGenerator[str, None]:
    """Yields pieces of text as they arrive and keeps `answer` up to date.

    `request` holds the model and the sampling parameters. Raises `PeerLost` when the router does not answer and
    `PdserveError` with its words when it refuses or the stream fails. Leaving the iteration closes the connection,
    which cancels the request.
    """
    body = {
        **request,
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=_SILENCE_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{base_url}/v1/chat/completions", json=body) as response,
        ):
            if response.status != 200:
                refusal = error_message(await response.read())
                raise PdserveError(refusal or f"The router answered {response.status} {response.reason}.")
            async for line in response.content:
                if text := _take(line, answer):
                    yield text
    except (aiohttp.ClientError, OSError) as error:
        raise unreachable(base_url, error) from error


def _take(line: bytes, answer: Answer) -> str:
    """One line of the event stream; the text it adds, which may be empty."""
    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
        return ""
    data = line.removeprefix(b"data:")
    if failure := error_message(data):
        raise PdserveError(failure)
    try:
        chunk = _Chunk.model_validate_json(data)
    except ValidationError as error:
        raise PdserveError(f"The stream holds something else than a chat completion: {data[:100]!r}.") from error
    answer.request_id = chunk.id or answer.request_id
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        answer.completion_tokens = chunk.usage.completion_tokens
    text = "".join(choice.delta.content or "" for choice in chunk.choices)
    if text:
        answer.last_at = time.monotonic()
        answer.first_at = answer.first_at or answer.last_at
        answer.text += text
    answer.finish_reason = next((choice.finish_reason for choice in chunk.choices), None) or answer.finish_reason
    return text


def first_model(models: bytes) -> str:
    """The name of the model in the answer of `GET /v1/models`. Raises `PdserveError` when there is none."""
    try:
        return str(json.loads(models)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise PdserveError("The router names no model at /v1/models; give one with --model.") from error
