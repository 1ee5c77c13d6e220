"""A channel connects when it is opened, not at its first call."""

from __future__ import annotations

import asyncio

from pdserve.base.ids import WorkerId, new_epoch
from pdserve.base.rpc import ChannelPool


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
