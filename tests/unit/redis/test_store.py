"""URLs and replies are checked before they are used, and calls have a deadline."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

import pytest
import redis.exceptions
from redis.asyncio.connection import AbstractConnection

from pdserve.base.errors import SetupError, StoreError
from pdserve.redis.store import Reply, Store, as_bytes, as_fields, as_list


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://localhost:port"])
def test_a_malformed_url_is_refused_at_start(url: str) -> None:
    with pytest.raises(SetupError, match="redis://HOST:PORT"):
        Store(url)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://user:secret@cache.local:6380/0", "cache.local:6380"),
        ("redis://cache.local", "cache.local:6379"),
        ("unix:///run/redis.sock", "/run/redis.sock"),
    ],
)
def test_the_address_for_logs_has_no_password(url: str, address: str) -> None:
    assert Store(url).address == address


@pytest.mark.parametrize("reply", [None, 1, [b"a"]])
def test_a_reply_that_is_not_a_string_is_refused(reply: Reply) -> None:
    with pytest.raises(StoreError):
        as_bytes(reply)


@pytest.mark.parametrize("reply", [None, 1, b"a"])
def test_a_reply_that_is_not_a_list_is_refused(reply: Reply) -> None:
    with pytest.raises(StoreError):
        as_list(reply)


def test_fields_are_pairs() -> None:
    assert as_fields([b"a", b"1", b"b", b"\xff"]) == {"a": b"1", "b": b"\xff"}
    with pytest.raises(StoreError):
        as_fields([b"a"])


@pytest.mark.virtual_time
async def test_a_server_that_never_answers_costs_exactly_the_timeout() -> None:
    loop = asyncio.get_running_loop()
    # The kernel accepts the connection, and no reply ever comes.
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        async with Store(f"redis://{host}:{port}", timeout_s=0.2) as store:
            started_at = loop.time()
            with pytest.raises(StoreError, match=r"no answer within 0\.2 s"):
                await store.call("PING")
            assert loop.time() - started_at == pytest.approx(0.2)


class Hung:
    """An open connection to a server that neither answers nor lets it be closed."""

    async def disconnect(self, nowait: bool = False) -> None:
        if not nowait:
            raise redis.exceptions.TimeoutError("Timed out closing connection after 5")

    def pack_commands(self, commands: object) -> list[bytes]:
        return []

    async def send_packed_command(self, *_: object, **__: object) -> None:
        raise ConnectionResetError


async def test_a_server_that_hangs_while_connections_to_it_are_closed_is_a_store_error() -> None:
    """Any other error would end the process: callers go on without Redis, and expect nothing else of it."""
    store = Store("redis://127.0.0.1:9")
    store._idle += cast(list[AbstractConnection], [Hung(), Hung()])
    with pytest.raises(StoreError):
        await store.call("PING")
    assert store._idle == []
