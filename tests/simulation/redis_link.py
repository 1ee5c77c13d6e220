"""The Redis process, and the connections of `pdserve.redis.store.Store` to it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from pdserve.redis.store import Store
from tests.simulation.loop import Process, SimulatedLoop
from tests.simulation.network import End, Network
from tests.simulation.redis_server import RedisFailure, RedisServer

ADDRESS = "redis:6379"


class RedisProcess:
    """Serves one `RedisServer`, whose data may outlive the process."""

    def __init__(self, network: Network, data: RedisServer) -> None:
        self.process = Process("redis")
        self.process.on_death.append(lambda with_host: network.kill_ends(self.process, with_host))
        self.data = data
        self._loop: SimulatedLoop = network.loop
        network.listen(ADDRESS, self.process, self._on_open)

    def _on_open(self, end: End) -> None:
        queue: deque[Any] = deque()
        end.on_item = lambda commands: self._take(end, queue, commands)

    def _take(self, end: End, queue: deque[Any], commands: list[tuple[Any, ...]]) -> None:
        end.send([self._answer(end, command) for command in commands if not self._blocks(end, command)])

    def _blocks(self, end: End, command: tuple[Any, ...]) -> bool:
        if str(command[0]).upper() not in ("XREAD", "BLPOP"):
            return False
        self._poll(end, command, self._loop.time() + _block_s(command))
        return True

    def _poll(self, end: End, command: tuple[Any, ...], until: float) -> None:
        """A blocking read looks again after each new entry, and when its time is over."""
        if not end.is_open:
            return
        reply = self._answer(end, command)
        if reply is not None or self._loop.time() >= until:
            end.send([reply])
            return
        is_due = [True]

        def look() -> None:
            if is_due.pop():
                is_due.append(False)
                self._poll(end, command, until)

        timer = self._loop.call_at(until, look)

        def wake() -> None:
            if is_due[0] and not self.process.is_dead:
                timer.cancel()
                self._loop.call_soon(look, context=self.process.context)

        self.data.on_entry.append(wake)

    def _answer(self, end: End, command: tuple[Any, ...]) -> Any:
        name, *arguments = command
        try:
            return self.data.execute(str(name), *arguments)
        except RedisFailure as failure:
            return ResponseError(str(failure))


def _block_s(command: tuple[Any, ...]) -> float:
    named = [str(argument).upper() for argument in command]
    if named[0] == "BLPOP":
        return float(command[-1])
    return float(command[named.index("BLOCK") + 1]) / 1000 if "BLOCK" in named else 0.0


class _Connection:
    """What `Store` uses of redis-py's connections."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._end: End | None = None
        self._replies: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._is_lost = False

    def pack_commands(self, commands: Any) -> list[tuple[Any, ...]]:
        """All commands in one message."""
        return [tuple(command) for command in commands]

    async def send_packed_command(self, commands: list[tuple[Any, ...]], check_health: bool = True) -> None:
        """Connects if necessary."""
        if self._end is None:
            try:
                self._end = await self._network.connect(ADDRESS, "redis")
            except OSError as error:
                raise RedisConnectionError(str(error)) from error
            self._end.on_item, self._end.on_lost = self._on_item, self._on_lost
        if self._is_lost:
            raise RedisConnectionError("Connection closed by server.")
        self._end.send(commands)

    async def read_response(self) -> Any:
        """One reply."""
        while not self._replies:
            if self._is_lost:
                raise RedisConnectionError("Connection closed by server.")
            self._arrived.clear()
            await self._arrived.wait()
        reply = self._replies.popleft()
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    async def disconnect(self, nowait: bool = False) -> None:
        """Closes it."""
        self._is_lost = True
        if self._end is not None:
            self._end.close()

    def _on_item(self, replies: list[Any]) -> None:
        self._replies.extend(replies)
        self._arrived.set()

    def _on_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._arrived.set()


class _Servers:
    """In place of `pdserve.redis.redis_servers.RedisServers`."""

    address = ADDRESS

    def __init__(self, network: Network) -> None:
        self._network = network

    async def connection(self) -> Any:
        """A new connection."""
        return _Connection(self._network)

    def forget(self) -> None:
        """There is one server."""


def open_store(network: Network) -> Store:
    """The product's store, over the simulated network."""
    store = Store(f"redis://{ADDRESS}")
    store._servers = _Servers(network)  # type: ignore[assignment]
    return store
