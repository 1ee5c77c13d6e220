"""The HTTP client of the Python API: one server, its answers as JSON, and its errors as exceptions."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

import aiohttp

from pdserve.base.api_key import KEY_VARIABLE, bearer
from pdserve.base.errors import (
    Cancelled,
    DeadlineExceeded,
    Forbidden,
    NotFound,
    Overloaded,
    PdserveError,
    PeerLost,
    QuotaExceeded,
    Unauthorized,
    all_codes,
)
from pdserve.llm.errors import PromptRefused
from pdserve.net.dead_hosts import notice_dead_hosts

_CONNECT_TIMEOUT_S = 10.0
_LOST_AFTER_S = 30
#: Longest line of a stream: an event with the log-probabilities of a token, or with the prompt's tokens.
_MAX_LINE_BYTES = 64 << 20
#: Where an overloaded server does not say when to come back.
_RETRY_AFTER_S = 1.0
_JITTER = 0.25


class RouterHttp:
    """A router at `base_url`. Connections are opened on the event loop that first uses them."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self.base_url = base_url
        self._headers = bearer(api_key)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes the connections, which ends requests that still run. The next request opens new ones."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def get(self, path: str) -> Any:
        """The JSON of `GET path`. Raises `PdserveError`."""
        async with self._request("GET", path) as response:
            return await self._json(response)

    async def post(self, path: str, body: Mapping[str, Any], request_id: str | None = None) -> Any:
        """The JSON of `POST path`. Raises `PdserveError`."""
        headers = None if request_id is None else {"X-Request-Id": request_id}
        async with self._request("POST", path, body, headers) as response:
            return await self._json(response)

    async def answers(self, path: str, body: Mapping[str, Any], request_id: str) -> AsyncGenerator[Any, None]:
        """The answer of a generating endpoint: the whole one, or its events with `stream`.

        Leaving the iteration closes the connection, which ends the request. Raises `PdserveError`.
        """
        async with self._request("POST", path, body, {"X-Request-Id": request_id}) as response:
            if not body.get("stream"):
                yield await self._json(response)
                return
            async for line in response.content:
                if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line.removeprefix(b"data:"))
                if "error" in event:
                    raise _error_of(event["error"], _status_of(event["error"]), self.base_url)
                yield event

    async def _json(self, response: aiohttp.ClientResponse) -> Any:
        body = await response.read()
        try:
            return json.loads(body)
        except ValueError:
            raise PdserveError(f"{response.url} answered without JSON, and not as pdserve does.") from None

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        if self._session is None:
            self._session = _new_session(self._headers)
        try:
            async with self._session.request(method, self.base_url + path, json=body, headers=headers) as response:
                if response.status != HTTPStatus.OK:
                    raise _error(response, await response.read(), self.base_url)
                yield response
        except (aiohttp.ClientError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise PeerLost(
                f"Cannot reach {self.base_url}: {reason}. Is the cluster running, and is `base_url` its address?"
            ) from error


def _new_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    # How many requests run at a time is bounded by the callers.
    connector = aiohttp.TCPConnector(limit=0, socket_factory=_open_socket)
    return aiohttp.ClientSession(
        headers=headers, timeout=timeout, connector=connector, read_bufsize=1 << 20, max_line_size=_MAX_LINE_BYTES
    )


def _open_socket(address: Any) -> socket.socket:
    """A socket that notices when the server's host is dead: an answer may take an hour."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    notice_dead_hosts(opened, _LOST_AFTER_S)
    return opened


def _error(response: aiohttp.ClientResponse, body: bytes, base_url: str) -> PdserveError:
    try:
        fields = json.loads(body)["error"]
        return _error_of(fields, response.status, base_url, response.headers.get("Retry-After"))
    except (ValueError, LookupError, TypeError):
        return PdserveError(f"{base_url} answered {response.status} {response.reason}, and not as pdserve does.")


def _status_of(fields: Mapping[str, Any]) -> int:
    """The status of an error within a stream, whose `code` may be a name."""
    code = fields.get("code")
    named = (codes.http for codes in all_codes() if codes.openai_code == code)
    return code if isinstance(code, int) else next(named, HTTPStatus.INTERNAL_SERVER_ERROR)


def _error_of(fields: Mapping[str, Any], status: int, base_url: str, retry_after: str | None = None) -> PdserveError:
    """The exception for an error of the HTTP API."""
    message = str(fields["message"])
    match status:
        case HTTPStatus.UNAUTHORIZED:
            return Unauthorized(f"{base_url} refuses: {message} Give a key as `api_key` or in {KEY_VARIABLE}.")
        case HTTPStatus.FORBIDDEN:
            return Forbidden(message)
        case HTTPStatus.NOT_FOUND:
            return NotFound(message)
        case HTTPStatus.TOO_MANY_REQUESTS | HTTPStatus.SERVICE_UNAVAILABLE:
            is_quota = fields.get("code") == "insufficient_quota"
            wait_s = float(retry_after or _RETRY_AFTER_S) * random.uniform(1, 1 + _JITTER)
            return (QuotaExceeded if is_quota else Overloaded)(message, retry_after_s=wait_s)
        case HTTPStatus.GATEWAY_TIMEOUT:
            return DeadlineExceeded(message)
        case 499:
            return Cancelled(message)
        case _ if 400 <= status < 500:
            return PromptRefused(message, param=fields.get("param"))
        case _:
            return PdserveError(f"{base_url} answered {status}: {message}")
