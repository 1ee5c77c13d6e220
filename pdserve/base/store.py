"""The one way to Redis: every call has a deadline, fails as `StoreError` only, and the next call connects again.

Redis is an aid here, never a need, so there are no retries inside a call: whoever calls has a loop of its own and knows
what to do meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeAlias

from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.exceptions import RedisError, ResponseError

from pdserve.base.errors import SetupError, StoreError
from pdserve.base.logs import get_logger

log = get_logger(__name__)

Argument: TypeAlias = bytes | str | int
#: What Redis answers, as it travels (RESP2): hashes are flat lists of names and values.
Reply: TypeAlias = "bytes | int | list[Reply] | None"


class Store:
    """Connections to one Redis, opened when needed and kept for the next call.

    Belongs to one event loop. A call that fails or is cancelled closes its connection, so that no reply can ever be
    taken for the answer to another command.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 0.5,
        on_change: Callable[[str | None], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_change` hears why Redis is away, and None when it is back. Raises `SetupError` on a malformed `url`."""
        self._new_connection, self.address = _parse(url)
        self._timeout_s = timeout_s
        self._on_change = on_change
        self._clock = clock
        self._idle: list[AbstractConnection] = []
        self._unavailable_since: float | None = None
        self._outages = 0
        self._closed = False

    async def __aenter__(self) -> Store:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def available(self) -> bool:
        """Whether the last call reached Redis."""
        return self._unavailable_since is None

    @property
    def unavailable_since(self) -> float | None:
        """When Redis was lost, on the store's clock; None while it answers."""
        return self._unavailable_since

    @property
    def outages(self) -> int:
        """Grows whenever a connection fails: another number than before means that Redis may have forgotten things."""
        return self._outages

    async def open(self) -> None:
        """Looks whether Redis is there. Not finding it is no error: every later call tries again."""
        with contextlib.suppress(StoreError):
            await self.call("PING")

    async def close(self) -> None:
        """Closes every connection; later calls fail."""
        self._closed = True
        await self._drop_idle()

    async def call(self, *command: Argument, block_s: float = 0.0) -> Reply:
        """Runs one command; `block_s` is how long the command itself may wait in Redis. Raises `StoreError`."""
        [reply] = await self.pipeline([command], block_s=block_s)
        return reply

    async def script(self, source: str, *, keys: Sequence[str], arguments: Sequence[Argument]) -> Reply:
        """Runs a Lua script, which is atomic. Raises `StoreError`."""
        return await self.call(*script_command(source, keys=keys, arguments=arguments))

    async def pipeline(self, commands: Sequence[Sequence[Argument]], *, block_s: float = 0.0) -> list[Reply]:
        """Sends all commands at once and returns their replies; not a transaction.

        Raises:
            StoreError: Redis cannot be reached, was too slow, or refused one of the commands (the others ran).
        """
        if self._closed:
            raise StoreError(f"The connection to Redis at {self.address} is closed.")
        connection = self._idle.pop() if self._idle else self._new_connection()
        try:
            async with asyncio.timeout(self._timeout_s + block_s):
                replies = await _exchange(connection, commands)
        except (RedisError, OSError) as error:
            await self._lost(connection, error)
            reason = "no answer in time" if isinstance(error, TimeoutError) else str(error).rstrip(".")
            raise StoreError(f"Redis at {self.address} cannot be used: {reason}.") from error
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        self._found()
        refused = next((reply for reply in replies if isinstance(reply, ResponseError)), None)
        if refused is not None:
            raise StoreError(f"Redis at {self.address} refused a command: {str(refused).rstrip('.')}.") from refused
        return [reply for reply in replies if not isinstance(reply, ResponseError)]

    async def _lost(self, connection: AbstractConnection, error: Exception) -> None:
        await connection.disconnect(nowait=True)
        self._outages += 1
        if self._unavailable_since is None:
            self._unavailable_since = self._clock()
            log.warning("store_lost", redis=self.address, reason=repr(error))
            self._on_change(f"Redis at {self.address} cannot be used")
        # What one connection met, the others will: a fresh one tells whether Redis is back.
        await self._drop_idle()

    def _found(self) -> None:
        if self._unavailable_since is not None:
            log.info("store_back", redis=self.address, away_s=self._clock() - self._unavailable_since)
            self._unavailable_since = None
            self._on_change(None)

    async def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.disconnect()


async def is_reachable(url: str, *, timeout_s: float = 0.5) -> bool:
    """Whether a Redis answers at `url` now. Raises `SetupError` on a malformed `url`."""
    new_connection, _ = _parse(url)
    connection = new_connection()
    try:
        async with asyncio.timeout(timeout_s):
            return await _exchange(connection, [["PING"]]) == [b"PONG"]
    except (RedisError, OSError):
        return False
    finally:
        await connection.disconnect()


async def _exchange(
    connection: AbstractConnection, commands: Sequence[Sequence[Argument]]
) -> list[Reply | ResponseError]:
    # Sending connects first when need be.
    await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    replies: list[Reply | ResponseError] = []
    for _ in commands:
        try:
            replies.append(await connection.read_response())
        except ResponseError as error:
            replies.append(error)
    return replies


def _parse(url: str) -> tuple[Callable[[], AbstractConnection], str]:
    """What makes a connection, and an address that may be logged (no password in it)."""
    try:
        arguments: dict[str, Any] = dict(parse_url(url))
    except ValueError as error:
        raise SetupError(f"The Redis URL cannot be used: {error}. Write redis://HOST:PORT or unix:///PATH.") from error
    connection_class: type[AbstractConnection] = arguments.pop("connection_class", Connection)
    address = arguments.get("path") or f"{arguments.get('host', 'localhost')}:{arguments.get('port', 6379)}"
    # Deadlines are ours, around the whole call; RESP2 is what `Reply` describes.
    arguments |= {"protocol": 2, "socket_timeout": None}
    return functools.partial(connection_class, **arguments), str(address)


def script_command(source: str, *, keys: Sequence[str], arguments: Sequence[Argument]) -> list[Argument]:
    """A script as a command for `Store.pipeline`. Redis keeps scripts compiled, so sending the text again is cheap."""
    return ["EVAL", source, len(keys), *keys, *arguments]


def as_bytes(reply: Reply) -> bytes:
    """The reply as bytes. Raises `StoreError` when it is something else."""
    if not isinstance(reply, bytes):
        raise StoreError(f"Redis answered {reply!r:.100} where a string was expected.")
    return reply


def as_list(reply: Reply) -> list[Reply]:
    """The reply as a list. Raises `StoreError` when it is something else."""
    if not isinstance(reply, list):
        raise StoreError(f"Redis answered {reply!r:.100} where a list was expected.")
    return reply


def as_fields(reply: Reply) -> dict[str, bytes]:
    """A flat list of names and values as a mapping. Raises `StoreError` when the reply is something else."""
    parts = [as_bytes(part) for part in as_list(reply)]
    if len(parts) % 2:
        raise StoreError(f"Redis answered {len(parts)} strings where names and values were expected.")
    return {name.decode(errors="replace"): value for name, value in zip(parts[::2], parts[1::2], strict=True)}
