"""A streamed answer, from its first byte to its last: server-sent events, or lines of JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from aiohttp import web

from pdserve.base.errors import PdserveError
from router_svc.api.http_request import REQUEST_ID_HEADER
from router_svc.api.ids import Ids
from router_svc.api.openai.choices import CollectedChoice
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import WRITE_TIMEOUT_S, DeltaSource, TokenUsage

#: The type of streams of server-sent events.
EVENTS = "text/event-stream; charset=utf-8"


class Formatter(Protocol):
    """The format of one response, streamed or whole."""

    @property
    def content_type(self) -> str:
        """The content type of the stream."""

    @property
    def continuous_usage(self) -> bool:
        """Whether `events` needs the usage so far."""

    @property
    def comment(self) -> bytes:
        """What keeps the connection open while no event comes; empty: the stream has no form for it."""

    async def opening(self, usage: TokenUsage, /) -> bytes:
        """The events before any token. `usage`: as far as it is known with the first token."""

    async def events(self, deltas: Sequence[ChoiceDelta], usage: TokenUsage | None) -> bytes:
        """The events of new output; empty: it gives none yet. Called in order."""

    async def closing(self, usage: TokenUsage) -> bytes:
        """The events after all tokens."""

    def failed(self, error: PdserveError) -> bytes:
        """The last events of a stream that has started and cannot go on."""

    def new_collection(self) -> list[CollectedChoice]:
        """An empty choice for each choice of the response."""

    async def whole(self, collected: Sequence[CollectedChoice], usage: TokenUsage) -> bytes:
        """The whole response."""


class EventStream:
    """Events to one client. Headers go out with the first token, so that an earlier error has its own status.

    A prompt that was admitted and waits long for its first token is an exception, where the format has comments: they
    keep its connection open.
    A client that reads slowly makes a write wait. One that disconnects makes it raise, or cancels the handler.
    """

    def __init__(self, request: web.Request, ids: Ids) -> None:
        self._request = request
        self._response = web.StreamResponse(
            headers={
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                REQUEST_ID_HEADER: ids.header,
            }
        )
        self._has_events = False
        self._formatter: Formatter | None = None
        self._last = b""

    async def send(self, formatter: Formatter, source: DeltaSource) -> None:
        """Sends all tokens. Raises what ends the source early."""
        self._formatter = formatter
        self._response.headers["Content-Type"] = formatter.content_type

        async def write(deltas: list[ChoiceDelta]) -> None:
            opening = b""
            if not self._has_events:
                self._has_events = True
                opening = await formatter.opening(source.usage)
                await self._prepare()
            events = opening + await formatter.events(deltas, source.usage if formatter.continuous_usage else None)
            if events:
                await self._response.write(events)
                if deltas[0].prompt_logprobs is None:
                    source.first_write()

        async def keep_alive() -> None:
            if formatter.comment and (self._response.prepared or source.is_admitted):
                await self._prepare()
                await self._response.write(formatter.comment)

        await source.write_to(write, keep_alive)
        self._last = await formatter.closing(source.usage)

    def fail(self, error: PdserveError) -> None:
        """The last event is this error. Raises it if nothing was sent, so that the answer has its status."""
        if self._formatter is None or not self._response.prepared:
            raise error
        self._last = self._formatter.failed(error)

    async def end(self) -> web.StreamResponse:
        """Sends the last events. Raises `ConnectionResetError` for a client that reads nothing.

        It comes after all work has ended, since it may take as long as the client pleases.
        """
        await self._prepare()  # The client may have all of a stream that it resumes.
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await self._response.write(self._last)
                await self._response.write_eof()
        except TimeoutError:
            raise ConnectionResetError(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s") from None
        return self._response

    async def _prepare(self) -> None:
        if not self._response.prepared:
            await self._response.prepare(self._request)
