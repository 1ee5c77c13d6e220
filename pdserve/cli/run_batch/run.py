"""Sends the requests of a batch, several at a time, and appends each result as it arrives."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus

import aiohttp

from pdserve.base.api_key import KEY_VARIABLE, bearer
from pdserve.base.batch_lines import BatchLine, result_line
from pdserve.base.errors import PdserveError, PeerLost, Unauthorized
from pdserve.base.tasks import service_group
from pdserve.cli.router_client import error_message, unreachable
from pdserve.cli.run_batch.output_file import OutputFile

_CONNECT_TIMEOUT_S = 10.0
#: Tries of a request whose connection is lost. A router that is restarted is back by then.
_CONNECTION_TRIES = 6
_FIRST_PAUSE_S = 0.25
#: Where an overloaded server does not say when to come back.
_RETRY_AFTER_S = 1.0
_JITTER = 0.25
_OVERLOADED = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where requests go, and how."""

    base_url: str
    api_key: str | None = None
    max_concurrency: int = 32
    overload_timeout_s: float = 600.0


@dataclass(slots=True)
class Summary:
    """Results of this run."""

    succeeded: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    request_id: str
    body: bytes
    retry_after_s: float


async def run_batch(
    target: Target, lines: Iterator[BatchLine], output: OutputFile, on_done: Callable[[], None] = lambda: None
) -> Summary:
    """Runs all requests; those that are refused have their refusal as result. Calls back after each.

    Raises `PdserveError` for what no other request would survive either: a lost connection, a key that is refused, a
    quota that is used up, overload without end, a full disk. The results until then are in the output.
    """
    summary = Summary()

    async def work(session: aiohttp.ClientSession) -> None:
        for line in lines:
            answer = await _answer(session, target, line)
            await output.append(result_line(line.custom_id, answer.status, answer.request_id, answer.body))
            if answer.status == HTTPStatus.OK:
                summary.succeeded += 1
            else:
                summary.failed += 1
            on_done()

    async with _session(target) as session:
        try:
            async with service_group() as group:
                tasks = [group.start(work(session), name=f"line {index}") for index in range(target.max_concurrency)]
                await asyncio.gather(*tasks)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
    return summary


@asynccontextmanager
async def _session(target: Target) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=bearer(target.api_key)) as session:
        yield session


async def _answer(session: aiohttp.ClientSession, target: Target, line: BatchLine) -> _Answer:
    """The answer to a request, once the server is neither overloaded nor away. Raises `PdserveError`."""
    waited_s, tries = 0.0, 0
    while True:
        try:
            answer = await _send(session, target, line)
        except (aiohttp.ClientError, OSError) as error:
            pause_s, tries = _FIRST_PAUSE_S * 2**tries, tries + 1
            if tries == _CONNECTION_TRIES:
                raise unreachable(target.base_url, error) from error
        else:
            if answer.status not in _OVERLOADED:
                return _checked(answer, target)
            pause_s = answer.retry_after_s * random.uniform(1, 1 + _JITTER)
            waited_s += pause_s
            if waited_s > target.overload_timeout_s or _is_quota(answer.body):
                raise PdserveError(
                    f"{target.base_url} answers {answer.status}: {error_message(answer.body)} Run the command again "
                    "later: it goes on with the requests that are left."
                )
        await asyncio.sleep(pause_s)


def _checked(answer: _Answer, target: Target) -> _Answer:
    """The answer of a request. Raises `PdserveError` if it is not one that belongs into a result."""
    if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise Unauthorized(
            f"{target.base_url} refuses: {error_message(answer.body)} Give a key with --api-key or {KEY_VARIABLE}."
        )
    try:
        json.loads(answer.body)
    except ValueError:
        raise PeerLost(f"{target.base_url} answered {answer.status}, and not as pdserve does.") from None
    return answer


async def _send(session: aiohttp.ClientSession, target: Target, line: BatchLine) -> _Answer:
    async with session.post(target.base_url + line.url, json=line.body) as response:
        retry_after = response.headers.get("Retry-After", "")
        return _Answer(
            status=response.status,
            request_id=response.headers.get("X-Request-Id", ""),
            body=await response.read(),
            retry_after_s=float(retry_after) if retry_after.isdecimal() else _RETRY_AFTER_S,
        )


def _is_quota(body: bytes) -> bool:
    """Whether a quota is used up, which no pause of seconds changes."""
    try:
        return bool(json.loads(body)["error"]["code"] == "insufficient_quota")
    except (ValueError, LookupError, TypeError):
        return False
