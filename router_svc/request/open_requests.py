"""The client requests that are open at this router: each has a deadline, and its owner can cancel it by its id.

A request is listed from its arrival, before its body is read, to the end of its work. Whatever ends it early cancels
the block that works for it, which frees everything, as for a client that disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

from pdserve.base.errors import Cancelled, DeadlineExceeded, EndedEarly
from pdserve.base.ids import RequestId
from pdserve.base.trace_context import TraceContext
from router_svc.records.traces import ID_PREFIXES
from router_svc.routing.timeouts import TIMEOUT_FIELD, TimeoutLimits


class OpenRequest:
    """One client request while the router works for it."""

    def __init__(self, tenant: str, timeout_s: float, *, spent_s: float = 0.0) -> None:
        """`spent_s`: time that it has had before, on another router."""
        self.tenant = tenant
        #: Its span; None: it has none.
        self.trace: TraceContext | None = None
        #: What it is doing, for the error.
        self.doing: Callable[[], str] = lambda: "its prompt was read"
        self._timeout_s = timeout_s
        self._arrived_at = asyncio.get_running_loop().time() - spent_s
        self._scope = asyncio.timeout_at(self._arrived_at + timeout_s)
        self._is_running = False
        self._cause: EndedEarly | None = None
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The block that works for the request. Raises `DeadlineExceeded` or `Cancelled` after the block was left."""
        try:
            async with self._scope:
                self._is_running = True
                try:
                    yield
                finally:
                    self.ended_by()
                    self._is_running = False
        except TimeoutError:
            if not self._scope.expired():
                raise
            raise self._cause or self._deadline_exceeded() from None
        finally:
            self._ended.set()

    def limit(self, timeout_s: float) -> None:
        """Shortens the timeout, which counts from the arrival. A longer one changes nothing."""
        if timeout_s < self._timeout_s:
            self._timeout_s = timeout_s
            self._reschedule(self._arrived_at + timeout_s)

    def cancel(self) -> None:
        """Ends the work. Harmless if it has ended."""
        if self._is_running and self._cause is None:
            self._cause = Cancelled("The request was cancelled (POST /v1/requests/{id}/cancel, or Cancel of gRPC).")
            self._reschedule(asyncio.get_running_loop().time())

    async def wait_ended(self) -> None:
        """Returns when the work has ended, and all calls to workers are closed."""
        await self._ended.wait()

    def ended_by(self) -> EndedEarly | None:
        """What ends the request early; None: nothing, or its client has left. Once it is known, it stays."""
        if self._cause is None and asyncio.get_running_loop().time() >= self._arrived_at + self._timeout_s:
            self._cause = self._deadline_exceeded()
        return self._cause

    def _reschedule(self, when: float) -> None:
        if self._is_running and not self._scope.expired():
            self._scope.reschedule(when)

    def _deadline_exceeded(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"The request was not complete after {self._timeout_s:g} s, which is its timeout: {self.doing()}. "
            f"Raise `{TIMEOUT_FIELD}`, ask for fewer tokens, or try again later."
        )


class OpenRequests:
    """The open requests by their ids. Clients choose ids, so several may have one."""

    def __init__(self, limits: TimeoutLimits) -> None:
        self.limits = limits
        self._by_id: dict[RequestId, list[OpenRequest]] = {}

    @asynccontextmanager
    async def entered(
        self, request_id: RequestId, tenant: str, timeout_s: float, *, spent_s: float = 0.0
    ) -> AsyncIterator[OpenRequest]:
        """A request with the response's id, from its arrival. Raises `DeadlineExceeded` or `Cancelled` at its end.

        `spent_s`: time that it has had before, on another router.
        """
        opened = OpenRequest(tenant, timeout_s, spent_s=spent_s)
        same = self._by_id.setdefault(request_id, [])
        same.append(opened)
        try:
            async with opened.running():
                yield opened
        finally:
            same.remove(opened)
            if not same:
                self._by_id.pop(request_id, None)

    async def cancel(self, request_id: str, tenant: str | None) -> bool:
        """Cancels the requests with this id, and returns when their work has ended. False: there are none.

        With `tenant`, only its own. The id is the response's, or the `X-Request-Id`.
        """
        found = [*self._found(request_id, tenant)]
        for opened in found:
            opened.cancel()
        for opened in found:
            await opened.wait_ended()
        return bool(found)

    def has(self, request_id: str, tenant: str | None) -> bool:
        """Whether `cancel` would find one."""
        return any(True for _ in self._found(request_id, tenant))

    def _found(self, request_id: str, tenant: str | None) -> Iterator[OpenRequest]:
        for prefix in ("", *ID_PREFIXES):
            for opened in self._by_id.get(RequestId(prefix + request_id), ()):
                if tenant in (None, opened.tenant):
                    yield opened

    def __len__(self) -> int:
        return sum(map(len, self._by_id.values()))
