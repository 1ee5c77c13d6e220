"""Sends one streamed request over HTTP and records when its chunks arrive."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

import aiohttp

from pdserve.base.errors import PdserveError
from pdserve.cli.bench.stream import (
    DONE,
    CompletionChunk,
    EventReader,
    NotACompletion,
    StreamRefused,
    TokenCounts,
    read_chunk,
)
from pdserve.cli.bench.workload import BenchRequest, RequestFailure, RequestRecord, Target
from pdserve.cli.router_client import error_message

_CONNECT_TIMEOUT_S = 30.0
#: Shorter than servers keep idle connections open, so that a request never meets one that the server is closing.
_KEEPALIVE_S = 2.0


@asynccontextmanager
async def open_session(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    """A session that opens a connection per concurrent request; the caller limits their number."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S, sock_read=target.silence_timeout_s)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S)
    headers = {"Content-Type": "application/json", **target.headers}
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
        yield session


@dataclass(slots=True)
class _Arrivals:
    """A stream while it arrives."""

    arrivals_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    end_s: float = 0.0
    usage: TokenCounts | None = None
    is_complete: bool = False

    def take(self, chunk: CompletionChunk, at_s: float) -> None:
        self.usage = chunk.usage or self.usage
        if not chunk.has_choice:
            return
        self.end_s = at_s
        self.texts.append(chunk.text)
        self.is_complete |= chunk.is_finished
        if chunk.has_token or (chunk.is_finished and not self.arrivals_s):
            # If the only token of a completion has no text, its end is the only sign of it.
            self.arrivals_s.append(at_s)


async def send(
    session: aiohttp.ClientSession, target: Target, request: BenchRequest, *, run_started_at: float
) -> RequestRecord:
    """Sends the request and reads its stream to the end. A failure is recorded, not raised.

    `run_started_at` is the start of the run in `time.perf_counter`'s seconds. Cancellation closes the connection.
    """
    body = json.dumps(target.body(request)).encode()
    seen = _Arrivals()
    started_at = time.perf_counter()
    failure = None
    try:
        async with session.post(target.base_url + target.endpoint, data=body) as response:
            if response.status == HTTPStatus.OK:
                await _read_stream(response, seen, started_at)
            else:
                failure = RequestFailure(
                    reason=f"HTTP {response.status}",
                    message=error_message(await response.read()) or str(response.reason),
                )
    except (TimeoutError, aiohttp.ClientError, OSError, PdserveError) as error:
        failure = RequestFailure(reason=_reason(error), message=str(error) or type(error).__name__)
    if failure is None and not (seen.is_complete and seen.arrivals_s):
        failure = RequestFailure(reason="broken stream", message="the stream ended before the completion did")
    return _record(request, seen, failure, start_s=started_at - run_started_at, took_s=time.perf_counter() - started_at)


async def _read_stream(response: aiohttp.ClientResponse, seen: _Arrivals, started_at: float) -> None:
    events = EventReader()
    async for data in response.content.iter_any():
        at_s = time.perf_counter() - started_at
        for payload in events.feed(data):
            if payload == DONE:
                seen.is_complete = True
            else:
                seen.take(read_chunk(payload), at_s)


def _record(
    request: BenchRequest, seen: _Arrivals, failure: RequestFailure | None, *, start_s: float, took_s: float
) -> RequestRecord:
    known_input = 0 if isinstance(request.prompt, str) else len(request.prompt)
    usage = seen.usage or TokenCounts(input_tokens=known_input, output_tokens=len(seen.arrivals_s))
    return RequestRecord(
        start_s=start_s,
        end_s=seen.end_s if failure is None else took_s,
        arrivals_s=tuple(seen.arrivals_s),
        input_tokens=usage.input_tokens,
        output_tokens=usage.output_tokens,
        is_counted_by_server=seen.usage is not None,
        text="".join(seen.texts),
        failure=failure,
    )


def _reason(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "timeout"
        case aiohttp.ClientConnectorError():
            return "unreachable"
        case StreamRefused():
            return "error in the stream"
        case NotACompletion():
            return "not a completion"
        case _:
            return "broken stream"
