"""Connections are shared while in use, kept for later, and closed when they are not needed any more."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial

import pytest

from pdserve.net.connection_pool import ConnectionPool


@dataclass(eq=False)
class Connection:
    key: str
    is_open: bool = True


@dataclass
class Network:
    """Opens connections and remembers them."""

    opened: list[Connection] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    async def connect(self, key: str) -> Connection:
        self.opened.append(Connection(key))
        return self.opened[-1]

    async def close(self, connection: Connection) -> None:
        connection.is_open = False
        self.closed.append(connection.key)

    def pool(self, max_kept: int | None = None) -> ConnectionPool[str, Connection]:
        return ConnectionPool(self.close, max_kept=max_kept, is_open=lambda connection: connection.is_open)


@pytest.fixture
def network() -> Network:
    return Network()


async def use(pool: ConnectionPool[str, Connection], network: Network, *keys: str) -> None:
    for key in keys:
        async with pool.use(key, partial(network.connect, key)):
            pass


async def test_a_connection_is_opened_once_and_kept_for_the_next_user(network: Network) -> None:
    pool = network.pool()
    connect = partial(network.connect, "a")
    async with pool.use("a", connect) as first, pool.use("a", connect) as second:
        assert second is first
    await use(pool, network, "a")
    assert network.opened == [first]
    assert network.closed == []


async def test_concurrent_users_wait_for_one_connect(network: Network) -> None:
    pool, may_connect, connecting = network.pool(), asyncio.Event(), asyncio.Event()

    async def connect() -> Connection:
        connecting.set()
        await may_connect.wait()
        return await network.connect("a")

    async def user() -> Connection:
        async with pool.use("a", connect) as connection:
            return connection

    async with asyncio.TaskGroup() as group:
        users = [group.create_task(user()) for _ in range(3)]
        await connecting.wait()
        may_connect.set()
    assert [task.result() for task in users] == network.opened * 3


async def test_a_failed_connect_leaves_no_entry_and_the_next_user_tries_again(network: Network) -> None:
    pool = network.pool()

    async def fail() -> Connection:
        raise ConnectionRefusedError

    with pytest.raises(ConnectionRefusedError):
        async with pool.use("a", fail):
            raise AssertionError("there is no connection")
    await use(pool, network, "a")
    assert len(network.opened) == 1


async def test_a_cancelled_connect_leaves_the_connection_to_the_next_user(network: Network) -> None:
    pool, connecting = network.pool(), asyncio.Event()

    async def hang() -> Connection:
        connecting.set()
        return await asyncio.get_running_loop().create_future()

    async def user() -> None:
        async with pool.use("a", hang):
            raise AssertionError("there is no connection")

    task = asyncio.create_task(user())
    await connecting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await use(pool, network, "a")
    assert len(network.opened) == 1


async def test_a_broken_connection_is_replaced_for_the_next_user(network: Network) -> None:
    pool = network.pool()
    async with pool.use("a", lambda: network.connect("a")) as first:
        first.is_open = False
        async with pool.use("a", lambda: network.connect("a")) as second:
            assert second is not first
    await use(pool, network, "a")
    assert network.opened == [first, second]


async def test_a_broken_connection_is_closed_with_its_last_user(network: Network) -> None:
    pool = network.pool()
    async with pool.use("a", lambda: network.connect("a")) as connection:
        connection.is_open = False
    assert network.closed == ["a"]


async def test_beyond_the_limit_the_least_recently_used_is_closed(network: Network) -> None:
    pool = network.pool(max_kept=2)
    await use(pool, network, "a", "b", "a", "c")
    assert network.closed == ["b"]
    await use(pool, network, "a")
    assert [connection.key for connection in network.opened] == ["a", "b", "c"]


async def test_a_connection_in_use_is_kept_beyond_the_limit(network: Network) -> None:
    pool = network.pool(max_kept=1)
    async with pool.use("a", lambda: network.connect("a")) as connection:
        await use(pool, network, "b", "c")
        assert connection.is_open
        assert network.closed == ["b", "c"]
    assert connection.is_open


async def test_a_sweep_closes_unused_connections_of_other_keys(network: Network) -> None:
    pool = network.pool()
    await use(pool, network, "kept", "gone")
    async with pool.use("used", lambda: network.connect("used")):
        await pool.sweep({"kept"})
        assert network.closed == ["gone"]
    await pool.sweep({"kept"})
    assert network.closed == ["gone", "used"]


async def test_closing_the_pool_closes_all(network: Network) -> None:
    pool = network.pool()
    await use(pool, network, "a", "b")
    await pool.close()
    assert network.closed == ["a", "b"]
