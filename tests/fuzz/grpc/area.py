"""A router with scripted workers, called over gRPC by whom it does not know."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc

from pdserve.cli.private_redis import PrivateRedis
from tests.fuzz.area import Area, Feeder
from tests.fuzz.grpc import inputs
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.support.redis import eventually
from tests.support.tiny_model import NAME, write_model

#: What a client can be answered: its fault, or a cluster that cannot do it now. Neither UNKNOWN nor INTERNAL.
_EXPECTED = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "UNIMPLEMENTED",
    "UNAUTHENTICATED",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "UNAVAILABLE",
}
#: Messages of a stream that is read: `Watch` never ends.
_MAX_MESSAGES = 2000
_WATCH_S = 0.05
_GENERATE = inputs.METHODS[0]
_ENDLESS = {"/grpc.health.v1.Health/Watch"}


class GrpcFeeder:
    """Calls, and connections with bytes."""

    def __init__(self, cluster: ScriptedCluster, channel: grpc.aio.Channel) -> None:
        self._cluster = cluster
        self._channel = channel

    async def feed(self, target: str, data: bytes) -> str:
        """A call or a connection; returns the status."""
        if target == "port":
            return await self._connect(data)
        if target == "generate":
            return await self._call(_GENERATE, (), data)
        if len(data) < 2:
            return "too short"
        method = inputs.METHODS[data[0] % len(inputs.METHODS)]
        return await self._call(method, inputs.METADATA[data[1] % len(inputs.METADATA)], data[2:])

    async def check(self) -> None:
        """The same answers over HTTP and gRPC, and nothing that is held, open or admitted."""
        cluster, router = self._cluster, self._cluster.router
        status, answer = await cluster.complete()
        assert (status, answer["choices"][0]["text"]) == (200, "Hello world."), answer
        assert await self._call(_GENERATE, (), inputs._SEEDS[0].SerializeToString()) == "OK"
        await cluster.calls.until(lambda: cluster.calls.num_open == 0)
        await eventually(self._is_idle)
        assert router.health.is_ready

    async def _is_idle(self) -> bool:
        router = self._cluster.router
        gate = router.models.first.gate
        return (router.num_open, router._intake.held_bytes, gate.num_admitted, gate.num_waiting) == (0, 0, 0, 0)

    async def _call(self, method: str, metadata: tuple[tuple[str, str | bytes], ...], data: bytes) -> str:
        call = self._channel.unary_stream(method)(data, metadata=metadata)
        with contextlib.suppress(grpc.RpcError):
            if method in _ENDLESS:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_WATCH_S):
                        await call.read()
                        await call.read()
                call.cancel()
                return "watched"
            async for _ in call:
                pass
        code: str = (await call.code()).name
        assert code in _EXPECTED, f"{method}: {code} {await call.details()}"
        return code

    async def _connect(self, data: bytes) -> str:
        host, port = self._cluster.grpc_address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            writer.write_eof()
            while await reader.read(65_536):
                pass
            return "closed"
        except OSError:  # the half-close of a connection that the server ended already is ENOTCONN
            return "reset"
        finally:
            writer.close()


@asynccontextmanager
async def open_feeder() -> AsyncIterator[Feeder]:
    """Starts everything."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = await stack.enter_async_context(PrivateRedis())
        model = write_model(directory / NAME)
        tiers = {"prefill-0": "prefill", "decode-0": "decode"}
        cluster = await stack.enter_async_context(open_cluster(redis, model, tiers))  # type: ignore[arg-type]
        yield GrpcFeeder(cluster, await stack.enter_async_context(cluster.channel()))


AREA = Area(
    name="grpc",
    targets={"generate": inputs.generate, "call": inputs.call, "port": inputs.port},
    open=open_feeder,
)
