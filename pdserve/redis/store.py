"""The only access to Redis: every call has a deadline, fails only with `StoreError`, and reconnects when needed.

Redis is useful but never required, so there are no retries inside a call. Callers have loops of their own, and know
how to do without Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeAlias

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from pdserve.base.errors import SetupError, StoreError
from pdserve.base.logs import get_logger
from pdserve.redis.redis_keys import DEFAULT_PREFIX, key_prefix, parse_prefix
from pdserve.redis.redis_servers import ask, is_in_charge, parse_servers

log = get_logger(__name__)

Argument: TypeAlias = bytes | str | int
#: A reply in the form of RESP2, where hashes are flat lists of names and values.
Reply: TypeAlias = "bytes | int | list[Reply] | None"


class Store:
    """Connections to one Redis, opened when needed and kept for the next call.

    Belongs to one event loop. A call that fails or is cancelled closes its connection, so that a late reply is never
    mistaken for the reply to another command. A server that is no longer in charge of our keys is as good as lost.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = DEFAULT_PREFIX,
        timeout_s: float = 0.5,
        on_change: Callable[[str | None], None] = lambda reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All keys begin with `prefix`. `on_change` gets the reason of an outage, and None when it ends.

        Raises `SetupError` on a malformed `url` or `prefix`.
        """
        try:
            self._prefix = key_prefix(url, parse_prefix(prefix))
        except ValueError as error:
            raise SetupError(f"--redis-prefix: {error}.") from error
        self._servers = parse_servers(url, prefix)
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
    def address(self) -> str:
        """Where Redis is, without a password."""
        return self._servers.address

    def key(self, name: str) -> str:
        """The key of that name in Redis."""
        return f"{self._prefix}:{name}"

    @property
    def available(self) -> bool:
        """Whether the last call reached Redis."""
        return self._unavailable_since is None

    @property
    def unavailable_since(self) -> float | None:
        """Start of the present outage, on the store's clock in seconds; None while Redis answers."""
        return self._unavailable_since

    @property
    def outages(self) -> int:
        """Number of failed connections. If it has changed, Redis may have lost data in between."""
        return self._outages

    async def open(self) -> None:
        """Tries to reach Redis. Failure is not an error here: every later call tries again."""
        with contextlib.suppress(StoreError):
            await self.call("PING")

    async def close(self) -> None:
        """Closes every connection; later calls fail."""
        self._closed = True
        await self._drop_idle()

    async def call(self, *command: Argument, block_s: float = 0.0) -> Reply:
        """Runs one command. `block_s`: time that the command itself may wait in Redis. Raises `StoreError`."""
        [reply] = await self.pipeline([command], block_s=block_s)
        return reply

    async def script(self, source: str, *, keys: Sequence[str], arguments: Sequence[Argument]) -> Reply:
        """Runs a Lua script, which is atomic. Raises `StoreError`."""
        return await self.call(*script_command(source, keys=keys, arguments=arguments))

    async def pipeline(self, commands: Sequence[Sequence[Argument]], *, block_s: float = 0.0) -> list[Reply]:
        """Sends all commands at once and returns their replies. Not a transaction.

        Raises:
            StoreError: Redis is unreachable, too slow, or refused one of the commands, while the others ran.
        """
        if self._closed:
            raise StoreError(f"The connection to Redis at {self.address} is closed.")
        connection: AbstractConnection | None = None
        try:
            async with asyncio.timeout(self._timeout_s + block_s):
                connection = self._idle.pop() if self._idle else await self._servers.connection()
                replies = await _exchange(connection, commands)
        except (RedisError, OSError) as error:
            await self._lost(connection, error)
            reason = str(error).rstrip(".")
            if isinstance(error, TimeoutError):
                reason = f"no answer within {self._timeout_s + block_s:g} s"
            raise StoreError(f"Redis at {self.address} cannot be used: {reason}.") from error
        except BaseException:
            if connection is not None:
                await connection.disconnect(nowait=True)
            raise
        self._idle.append(connection)
        self._found()
        refused = next((reply for reply in replies if isinstance(reply, ResponseError)), None)
        if refused is not None:
            raise StoreError(f"Redis at {self.address} refused a command: {str(refused).rstrip('.')}.") from refused
        return [reply for reply in replies if not isinstance(reply, ResponseError)]

    async def _lost(self, connection: AbstractConnection | None, error: Exception) -> None:
        if connection is not None:
            await connection.disconnect(nowait=True)
        self._servers.forget()
        self._outages += 1
        if self._unavailable_since is None:
            self._unavailable_since = self._clock()
            log.warning("store_lost", redis=self.address, reason=repr(error))
            self._on_change(f"Redis at {self.address} cannot be used")
        # The other connections are likely to be broken, too. A new one shows whether Redis is back.
        await self._drop_idle()

    def _found(self) -> None:
        if self._unavailable_since is not None:
            log.info("store_back", redis=self.address, away_s=self._clock() - self._unavailable_since)
            self._unavailable_since = None
            self._on_change(None)

    async def _drop_idle(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            # Without waiting for its end: a hung server behind TLS has none, and the library raises an error for that.
            await connection.disconnect(nowait=True)


async def is_reachable(url: str, *, timeout_s: float = 0.5) -> bool:
    """Whether a Redis answers at `url`. Raises `SetupError` on a malformed `url`."""
    servers = parse_servers(url, DEFAULT_PREFIX)
    try:
        async with asyncio.timeout(timeout_s):
            return bool(await ask(await servers.connection(), "PING") == b"PONG")
    except (RedisError, OSError):
        return False


async def _exchange(
    connection: AbstractConnection, commands: Sequence[Sequence[Argument]]
) -> list[Reply | ResponseError]:
    # Sending connects first if necessary.
    await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
    replies: list[Reply | ResponseError] = []
    for _ in commands:
        try:
            replies.append(await connection.read_response())
        except ResponseError as error:
            if not is_in_charge(error):
                raise
            replies.append(error)
    return replies


def script_command(source: str, *, keys: Sequence[str], arguments: Sequence[Argument]) -> list[Argument]:
    """A script as a command for `Store.pipeline`. Redis caches compiled scripts, so sending the text again is cheap."""
    return ["EVAL", source, len(keys), *keys, *arguments]


def as_bytes(reply: Reply) -> bytes:
    """The reply as bytes. Raises `StoreError` when it is of another type."""
    if not isinstance(reply, bytes):
        raise StoreError(f"Redis answered {reply!r:.100} where a string was expected.")
    return reply


def as_list(reply: Reply) -> list[Reply]:
    """The reply as a list. Raises `StoreError` when it is of another type."""
    if not isinstance(reply, list):
        raise StoreError(f"Redis answered {reply!r:.100} where a list was expected.")
    return reply


def as_fields(reply: Reply) -> dict[str, bytes]:
    """A flat list of names and values as a mapping. Raises `StoreError` when the reply is of another type."""
    flat = [as_bytes(item) for item in as_list(reply)]
    if len(flat) % 2:
        raise StoreError(f"Redis answered {len(flat)} strings where pairs of names and values were expected.")
    return {name.decode(errors="replace"): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
