"""grpc's server, which no name of a method can stop, and writes that a cancellation cannot cut short.

From version 1.83 on, grpc accepts all calls of unregistered methods in one loop, and decodes their names there: a name
that is no UTF-8 ends the loop, and with it the server and every call on it. Anybody who reaches the port can send one.
Here these calls are answered without a look at the name. So a method has to be registered, as generated code does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined] # grpc's types lack it.

from pdserve.base.tasks import run_to_completion
from pdserve.net.grpc_log import keep_metadata_out_of_the_log

#: The name of unregistered methods in grpc's own log.
_UNREGISTERED = "unregistered"


class _NoMethods:
    """Finds no method."""

    def resolve_handler(self, details: object) -> None:
        """There is none: the caller gets UNIMPLEMENTED."""
        return


class _RegisteredMethodsOnly(cygrpc.AioServer):  # type: ignore[misc]
    """Answers calls of unregistered methods by itself."""

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """grpc's hook: the next call of a registered method. With None: a task that refuses all other calls."""
        if method is not None:
            future: asyncio.Future[Any] = super()._make_request_call_future(method)
            return future
        return asyncio.get_running_loop().create_task(self._refuse())

    async def _refuse(self) -> None:
        """Refuses calls until the server stops: then grpc cancels this task or makes `_request_call` raise."""
        loop, refusals = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        while True:
            call = await self._request_call()
            refusal = cygrpc._handle_rpc(_UNREGISTERED, _NoMethods(), (), call, loop, False)
            task = loop.create_task(cygrpc._schedule_rpc_coro(refusal, call, loop, _UNREGISTERED))
            refusals.add(task)
            task.add_done_callback(refusals.discard)


def grpc_server(**settings: Any) -> grpc.aio.Server:
    """As `grpc.aio.server`."""
    keep_metadata_out_of_the_log()
    original = cygrpc.AioServer
    # Earlier versions decode each name in a task of its own, and have no hook.
    if hasattr(original, "_make_request_call_future"):
        cygrpc.AioServer = _RegisteredMethodsOnly
    try:
        return grpc.aio.server(**settings)
    finally:
        cygrpc.AioServer = original


def whole_writes(context: grpc.aio.ServicerContext[Any, Any]) -> Callable[[Any], Awaitable[None]]:
    """`context.write`, for a method in which one task can cancel another one, as in a task group.

    A cancellation waits until the message is written. While the message of a cancelled task is still on its way, grpc
    refuses what comes next, the status included, and the caller would wait for the status in vain.
    """

    async def write(message: Any) -> None:
        await run_to_completion(context.write(message))

    return write
