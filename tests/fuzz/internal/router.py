"""A router whose workers send anything, and announcements of messages that a transport reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import Any, cast

from google.protobuf.message import DecodeError

from kvtransfer.transport.torch_distributed.address import DataAddress
from kvtransfer.transport.torch_distributed.control import ListenerControl
from kvtransfer.transport.torch_distributed.pair import Arrival, Pair
from kvtransfer.transport.ucx_address import unpack_address
from pdserve.base.errors import PeerLost
from pdserve.net.frames import Frames
from pdserve.v1 import prefill_pb2
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.script import Context, Fault, hang
from tests.support.redis import eventually

_MAX_MESSAGE = 1 << 20
#: Time that a router is given for what a worker has sent, before the worker leaves.
_PATIENCE_S = 0.02


class Routers:
    """A router with scripted workers, of which the next one asked is a stranger."""

    def __init__(self, cluster: ScriptedCluster) -> None:
        self._cluster = cluster
        # A router may be granted any ticket.
        cluster.calls.commits = defaultdict(asyncio.Event)

    async def events(self, data: bytes) -> str:
        """The decode worker sends these bytes in place of everything."""

        async def send(context: Context) -> None:
            stream = cast(Any, context)
            stream._transport.write(data)
            await asyncio.sleep(_PATIENCE_S)
            # Closed by this end: the fake worker ends this task when it notices.
            stream.close()
            await hang(context)

        return await self._ask("decode", send)

    async def prefill_events(self, data: bytes) -> str:
        """The prefill worker sends these messages first."""
        frames = Frames(_MAX_MESSAGE)
        frames.add(data)
        messages = []
        with contextlib.suppress(ValueError, DecodeError):
            for frame in frames.take(100):
                messages.append(prefill_pb2.PrefillResponse.FromString(frame))  # noqa: PERF401 - Up to the first that is none.

        async def send(context: Context) -> None:
            for message in messages:
                await cast(Any, context).write(message)

        return await self._ask("prefill", send)

    async def check(self) -> None:
        """The same answer as ever, and nothing open."""
        cluster, gate = self._cluster, self._cluster.router.models.first.gate
        await eventually(self._knows_its_workers)
        status, answer = await cluster.complete()
        assert (status, answer["choices"][0]["text"]) == (200, "Hello world."), answer
        await cluster.calls.until(lambda: cluster.calls.num_open == 0)
        assert (cluster.router.num_open, gate.num_admitted, gate.num_waiting) == (0, 0, 0)

    async def _ask(self, point: str, fault: Fault) -> str:
        script = self._cluster.script
        script.fail(point, fault)
        await eventually(self._knows_its_workers)
        status, answer = await self._cluster.complete(n=2, logprobs=1)
        script.faults.clear()
        # A worker may report a defect of its own. One of the router would be logged.
        assert status != 500 or answer["error"]["type"] == "internal_error", answer
        async with self._cluster.http.get(self._cluster.admin_url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        # The skew is unknown until Redis has answered, which can take long on a busy machine.
        assert [line for line in lines if line.endswith(" NaN") and "clock_skew_seconds" not in line] == []
        return str(status)

    async def _knows_its_workers(self) -> bool:
        """A worker that closes a stream counts as lost until its next heartbeat."""
        cluster = self._cluster.router.cluster
        return len(cluster.ready("prefill")) == len(cluster.ready("decode")) == 1


class _Link:
    """A link that receives nothing."""


class Announcements:
    """A listener of torch.distributed's control connections, as far as our code reads them."""

    def __init__(self) -> None:
        self._pairs: list[Pair] = []
        self._announced = 0

    def accept(self, control: asyncio.Transport) -> Pair:
        """Implements `Listener`."""
        self._pairs.append(Pair(control, cast(Any, _Link())))
        return self._pairs[-1]

    def announced(self, pair: Pair, tag: int, num_bytes: int) -> None:
        """Implements `Listener`: the message lands at once, but for every other one."""
        self._announced += 1
        if self._announced % 2:
            pair.arrivals.add(Arrival(pair, tag, num_bytes))

    def lose(self, pair: Pair) -> None:
        """Implements `Listener`."""
        pair.lost = True

    async def control(self, data: bytes) -> str:
        """A connection with these announcements: as many are read as may be under way."""
        self._announced = 0
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: ListenerControl(self), "127.0.0.1", 0)
        try:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
            writer.write(data)
            expected = min(len(data) // 16, 16_384)
            await eventually(lambda: _is(self._announced >= expected))
            writer.close()
            await eventually(lambda: _is(all(pair.lost for pair in self._pairs) or self._announced >= 16_384))
        finally:
            for pair in self._pairs:
                pair.control.abort()
            self._pairs.clear()
            server.close()
        return "announced"

    async def address(self, data: bytes) -> str:
        """The data address of a ticket, as both transports read it."""
        found = "no address"
        for unpack in (DataAddress.unpack, unpack_address):
            try:
                unpack(data)
                found = "an address"
            except PeerLost:
                continue
        return found


async def _is(condition: bool) -> bool:
    return condition
