"""Where Redis is: one server, the master that Sentinels name, or the node of a cluster that has our keys.

All keys of a cluster of ours are in one hash slot, so they are on one node: they are few, and the scripts that keep
them consistent touch several. A server that fails or hands over is forgotten, and the next connection looks for its
successor.
"""

from __future__ import annotations

import functools
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qs, urlencode

from redis.asyncio.connection import AbstractConnection, Connection, parse_url
from redis.crc import key_slot
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AskError,
    ClusterDownError,
    MasterDownError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from pdserve.base.errors import SetupError
from pdserve.redis.redis_keys import key_prefix

_SEVERAL = re.compile(
    r"(?P<scheme>rediss?)\+(?P<kind>sentinel|cluster)://(?:(?P<login>[^@/?]*)@)?(?P<hosts>[^/?]+)"
    r"(?:/(?P<path>[^?]*))?(?:\?(?P<query>.*))?"
)
_FORMS = (
    "redis://HOST:PORT, rediss://HOST:PORT (TLS), unix:///PATH, redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, or "
    "redis+cluster://HOST:PORT,HOST:PORT"
)
#: Replies of a server that is no longer, or not yet, in charge of our keys. `MovedError` is an `AskError`.
_NOT_IN_CHARGE = (AskError, ClusterDownError, MasterDownError, ReadOnlyError, TryAgainError)

#: Arguments of connections to Sentinels, too.
_OF_EVERY_CONNECTION = ("connection_class", "protocol", "socket_timeout", "driver_info")

NewConnection = Callable[[], AbstractConnection]


class RedisServers(Protocol):
    """The servers behind one URL."""

    @property
    def address(self) -> str:
        """Hosts and ports, or a path, without a password: for logs and messages."""

    async def connection(self) -> AbstractConnection:
        """A new connection to the server in charge, not connected yet. Raises `RedisError` or `OSError`."""

    def forget(self) -> None:
        """The server in charge has failed or is not in charge any more."""


def parse_servers(url: str, prefix: str) -> RedisServers:
    """The servers of a URL, for keys with this prefix. Raises `SetupError` when the URL cannot be used."""
    try:
        several = _SEVERAL.fullmatch(url)
        if several is None:
            return _OneServer(url)
        if several["kind"] == "cluster":
            return _Cluster(several, prefix)
        return _Sentinels(several)
    except (ValueError, TypeError) as error:
        raise SetupError(f"The Redis URL cannot be used: {error}. Write {_FORMS}.") from error


def is_in_charge(error: ResponseError) -> bool:
    """Whether the server that gave this error has our keys and accepts writes."""
    # Inside a script, the error of a replica is part of the script's error.
    return not isinstance(error, _NOT_IN_CHARGE) and "READONLY" not in str(error)


async def ask(connection: AbstractConnection, *command: str) -> Any:
    """One command on a connection of its own, which is closed afterwards. Raises `RedisError` or `OSError`."""
    try:
        await connection.send_packed_command(connection.pack_commands([command]), check_health=False)
        return await connection.read_response()
    finally:
        await connection.disconnect(nowait=True)


class _OneServer:
    def __init__(self, url: str) -> None:
        arguments = _arguments(url)
        self.address = str(
            arguments.get("path") or f"{arguments.get('host', 'localhost')}:{arguments.get('port', 6379)}"
        )
        self._new_connection = _factory(arguments)

    async def connection(self) -> AbstractConnection:
        return self._new_connection()

    def forget(self) -> None:
        """There is no other server."""


class _Located:
    """One of several servers, which one of some others knows."""

    def __init__(self, url: re.Match[str], *, path: str, query: str) -> None:
        hosts = url["hosts"].split(",")
        login = f"{url['login']}@" if url["login"] else ""
        self.address = ",".join(hosts)
        self._hosts = deque(hosts)
        self._arguments = _arguments(f"{url['scheme']}://{login}{hosts[0]}/{path}?{query}")
        self._server: NewConnection | None = None
        _factory(self._arguments)

    async def connection(self) -> AbstractConnection:
        if self._server is None:
            with self._next_host_on_failure():
                host, port = await self._locate(self._hosts[0])
            self._server = _factory(self._arguments | {"host": host, "port": port})
        return self._server()

    def forget(self) -> None:
        self._server = None

    async def _locate(self, host: str) -> tuple[str, int]:
        raise NotImplementedError

    @contextmanager
    def _next_host_on_failure(self) -> Iterator[None]:
        # A host that does not answer uses up the whole deadline of a call, so the next call asks another one.
        try:
            yield
        except BaseException:
            self._hosts.rotate(-1)
            raise


class _Sentinels(_Located):
    def __init__(self, url: re.Match[str]) -> None:
        path: str = url["path"] or ""
        self._service, _, database = path.partition("/")
        if not self._service:
            raise ValueError("it does not name the service that the Sentinels monitor")
        query = parse_qs(url["query"] or "")
        login = {name: query.pop(f"sentinel_{name}", [None])[0] for name in ("username", "password")}
        super().__init__(url, path=database, query=urlencode(query, doseq=True))
        self._sentinel = {key: value for key, value in self._arguments.items() if key.startswith("ssl_")}
        self._sentinel |= {key: value for key, value in login.items() if value is not None}
        self._sentinel |= {key: self._arguments[key] for key in _OF_EVERY_CONNECTION}

    async def _locate(self, host: str) -> tuple[str, int]:
        name, port = _host_and_port(host, default_port=26379)
        connection = _factory(self._sentinel | {"host": name, "port": port})()
        master = await ask(connection, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._service)
        if master is None:
            raise RedisError(f"the Sentinel at {host} monitors no service named {self._service!r}")
        return master[0].decode(), int(master[1])


class _Cluster(_Located):
    def __init__(self, url: re.Match[str], prefix: str) -> None:
        if url["path"]:
            raise ValueError("a cluster has no databases, so nothing may follow its hosts")
        super().__init__(url, path="", query=url["query"] or "")
        self._slot = key_slot(f"{key_prefix(url[0], prefix)}:".encode())

    async def _locate(self, host: str) -> tuple[str, int]:
        name, port = _host_and_port(host, default_port=6379)
        slots = await ask(_factory(self._arguments | {"host": name, "port": port})(), "CLUSTER", "SLOTS")
        for first, last, master, *_ in slots:
            if first <= self._slot <= last:
                return (master[0] or name.encode()).decode(), int(master[1])
        raise RedisError(f"no node of the cluster at {host} has hash slot {self._slot}, where our keys are")


class _PasswordFile(CredentialProvider):
    """A password that is read for each connection, so that a replaced one needs no restart."""

    def __init__(self, path: str, username: str | None) -> None:
        self._path, self._username = Path(path), username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """User, if there is one, and password. Raises `RedisError` without either in its text."""
        try:
            password = self._path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise RedisError(f"the password in {self._path} cannot be read: {reason}") from error
        return (password,) if self._username is None else (self._username, password)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same. Without it, redis-py logs a warning for each connection."""
        return self.get_credentials()


def _arguments(url: str) -> dict[str, Any]:
    """Arguments of a connection class, which is itself one of them. Raises ValueError."""
    arguments: dict[str, Any] = {"connection_class": Connection, **parse_url(url)}
    path = arguments.pop("password_file", None)
    if path is not None:
        if "password" in arguments:
            raise ValueError("it has both a password and a password_file")
        provider = _PasswordFile(path, arguments.pop("username", None))
        try:
            provider.get_credentials()
        except RedisError as error:
            raise ValueError(error) from error
        arguments["credential_provider"] = provider
    # Deadlines cover the whole call, in `Store.pipeline`. Replies are those of RESP2. Nothing of redis-py's own goes to
    # Redis (CLIENT SETINFO), where a user without that right would fill the log of denials with it.
    return arguments | {"protocol": 2, "socket_timeout": None, "driver_info": None}


def _factory(arguments: dict[str, Any]) -> NewConnection:
    """Raises TypeError when the class knows no such argument."""
    given = dict(arguments)
    new_connection = functools.partial(given.pop("connection_class"), **given)
    new_connection()
    return new_connection


def _host_and_port(text: str, *, default_port: int) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        return text.strip("[]"), default_port
    return host.strip("[]"), int(port)
