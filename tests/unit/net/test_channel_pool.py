"""A channel connects when it is opened, not at its first call."""

from __future__ import annotations

import asyncio

from pdserve.base.ids import WorkerId, new_epoch
from pdserve.net.rpc import ChannelPool


async def test_an_opened_channel_connects_before_its_first_call() -> None:
    connected = asyncio.Event()

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = ChannelPool()
    try:
        await pool.open(WorkerId("w"), new_epoch(), f"127.0.0.1:{port}")
        await asyncio.wait_for(connected.wait(), 20)
    finally:
        await pool.close()
        server.close()


async def test_another_address_for_a_worker_gets_another_channel() -> None:
    """Tickets of strangers name any address: calls of others must not go there."""
    pool, epoch = ChannelPool(), new_epoch()
    async with (
        pool.use(WorkerId("w"), epoch, "127.0.0.1:1") as first,
        pool.use(WorkerId("w"), epoch, "127.0.0.1:2") as second,
        pool.use(WorkerId("w"), epoch, "127.0.0.1:1") as again,
    ):
        assert first is again
        assert first is not second
    await pool.sweep([(WorkerId("w"), epoch)])
    async with pool.use(WorkerId("w"), epoch, "127.0.0.1:1") as kept:
        assert kept is first
    await pool.sweep([])
    async with pool.use(WorkerId("w"), epoch, "127.0.0.1:1") as new:
        assert new is not first
    await pool.close()
