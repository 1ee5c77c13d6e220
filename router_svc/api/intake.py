"""What bodies may cost before they are understood: a byte budget, a deadline, and the queue of the text threads.

HTTP and gRPC share it. Without it, connections that send large bodies slowly take memory without end, all before the
admission queue, which counts prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from aiohttp import hdrs, web

from pdserve.base.errors import Overloaded, RequestError
from pdserve.base.tasks import in_turns
from pdserve.observe.metrics import CounterSource
from router_svc.api.body import Body
from router_svc.api.parse import parse_body
from router_svc.api.text_threads import TextThreads
from router_svc.api.unpack import Unpacker
from router_svc.config import RouterConfig

#: Bodies up to this size may take the whole budget. Larger ones leave some of it.
SMALL_BODY_BYTES = 64 * 1024
#: Bodies up to this size are parsed on the event loop: in 9 ms on a slow core, whatever they have.
_PARSED_AT_ONCE_BYTES = 16 * 1024
#: Bytes of all bodies that arrive or wait to be parsed.
MAX_BYTES = 256 * 1024**2
#: Time a client has to send its body.
BODY_TIMEOUT_S = 60.0
_LARGE_SHARE = 0.75
#: Most bodies have arrived and are parsed in less time.
_RETRY_AFTER_S = 5.0

AnyBody = TypeVar("AnyBody", bound=Body)


class Hold:
    """The bytes of one body that count against the budget."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Counts bytes that have arrived. Raises `Overloaded` when there is no room for them."""
        self._intake.require_room(self.num_bytes + num_bytes, num_bytes)
        self.num_bytes += num_bytes
        self._intake.held_bytes += num_bytes

    def release(self) -> None:
        """Gives the bytes back. Further calls are harmless."""
        self._intake.held_bytes -= self.num_bytes
        self.num_bytes = 0


class Intake:
    """Reads and parses bodies within the budget. Belongs to the event loop."""

    def __init__(
        self,
        threads: TextThreads,
        *,
        max_bytes: int = MAX_BYTES,
        timeout_s: float = BODY_TIMEOUT_S,
        tolerates_unknown_fields: bool = False,
        trusts_templates: bool = False,
    ) -> None:
        #: Threads for work on bodies whose model is not known yet.
        self.threads = threads
        self._rules = {"tolerates_unknown_fields": tolerates_unknown_fields, "trusts_templates": trusts_templates}
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        #: Bytes of all bodies at present.
        self.held_bytes = 0
        #: Bodies that were refused because there was no room for them.
        self.refused = 0

    @classmethod
    def of(cls, config: RouterConfig, threads: TextThreads) -> Intake:
        """The intake of a router with these settings, which say what it tolerates."""
        return cls(
            threads,
            tolerates_unknown_fields=config.unknown_fields == "warn",
            trusts_templates=config.trust_request_chat_template,
        )

    @contextmanager
    def hold(self) -> Iterator[Hold]:
        """The count of one body, given back when the block ends."""
        hold = Hold(self)
        try:
            yield hold
        finally:
            hold.release()

    def counters(self) -> tuple[CounterSource, CounterSource]:
        """What was refused, for metrics."""
        return (
            CounterSource(
                name="bodies_refused",
                text="Request bodies refused because too many were incomplete",
                value=lambda: self.refused,
            ),
            CounterSource(
                name="texts_refused",
                text="Texts refused because too many waited to be tokenized",
                value=lambda: self.threads.refused,
            ),
        )

    async def read(self, request: web.Request, cls: type[AnyBody]) -> AnyBody:
        """The validated body of a request. Raises `RequestError` or `Overloaded`."""
        with self.hold() as hold:
            body = await self._receive(request, hold)
            if len(body) <= _PARSED_AT_ONCE_BYTES:
                return parse_body(cls, body, **self._rules)
            return await self.threads.run(len(body), lambda: parse_body(cls, body, **self._rules))

    def require_room(self, body_bytes: int, more: int) -> None:
        """Raises `Overloaded` unless `more` bytes of a body, which has `body_bytes` then, are within the budget."""
        share = 1.0 if body_bytes <= SMALL_BODY_BYTES else _LARGE_SHARE
        if self.held_bytes + more > self._max_bytes * share:
            self.refused += 1
            raise Overloaded(
                f"The router holds {self.held_bytes} bytes of requests that are not complete "
                f"(limit {int(self._max_bytes * share)}). Retry after {_RETRY_AFTER_S:g} s.",
                retry_after_s=_RETRY_AFTER_S,
            )

    async def _receive(self, request: web.Request, hold: Hold) -> bytes:
        # Announced by the client: refused before a byte of it is read.
        announced = request.content_length or 0
        _require_size(request, announced)
        self.require_room(announced, announced)
        unpacker = Unpacker(request.headers.getall(hdrs.CONTENT_ENCODING, ()))
        pieces: list[bytes] = []
        received = 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for data in request.content.iter_any():
                    received += len(data)
                    _require_size(request, received)
                    async for piece in in_turns(unpacker.take(data)):
                        hold.add(len(piece))
                        _require_size(request, hold.num_bytes)
                        pieces.append(piece)
                for piece in unpacker.finish():
                    hold.add(len(piece))
                    _require_size(request, hold.num_bytes)
                    pieces.append(piece)
        except TimeoutError:
            raise RequestError(
                f"The request body did not arrive within {self._timeout_s:g} s. Send it faster, or send less."
            ) from None
        return b"".join(pieces)


def _require_size(request: web.Request, num_bytes: int) -> None:
    """Raises `HTTPRequestEntityTooLarge` for a body beyond the limit, compressed or not."""
    if num_bytes > request.client_max_size:
        raise web.HTTPRequestEntityTooLarge(max_size=request.client_max_size, actual_size=num_bytes)
