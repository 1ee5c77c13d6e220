"""Transports under test, and second processes that take commands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from kvtransfer.transport import Transport
from tests.integration.kvtransfer.memory import Memory
from tests.integration.kvtransfer.opening import ON_TWO_GPUS, open_any
from tests.integration.kvtransfer.processes import RemotePeer

OpenTransport = Callable[[], Transport]
StartPeer = Callable[[], Awaitable[RemotePeer]]
StartWorker = Callable[[str], Awaitable[RemotePeer]]


@pytest.fixture
def memory(transport_name: str) -> Memory:
    """The memory of this process."""
    return Memory("cuda:0" if transport_name == ON_TWO_GPUS else None)


@pytest.fixture
async def start_transport(transport_name: str) -> AsyncIterator[OpenTransport]:
    """Opens transports of the parametrised kind; closes them at the end."""
    opened: list[Transport] = []

    def start() -> Transport:
        opened.append(open_any(transport_name))
        return opened[-1]

    yield start
    for transport in opened:
        await transport.close()


@pytest.fixture
async def start_process(transport_name: str) -> AsyncIterator[Callable[..., Awaitable[RemotePeer]]]:
    """Starts modules of this package in processes of their own; kills those at the end."""
    started: list[RemotePeer] = []

    async def start(module: str, *arguments: str) -> RemotePeer:
        transport = ["nccl", "cuda:1"] if transport_name == ON_TWO_GPUS else [transport_name]
        started.append(RemotePeer(module, [*transport, *arguments]))
        await started[-1].connect()
        return started[-1]

    yield start
    for peer in started:
        await peer.kill()
        peer.close()


@pytest.fixture
def start_peer(start_process: Callable[..., Awaitable[RemotePeer]]) -> StartPeer:
    """Starts processes with a transport of the parametrised kind."""

    async def start() -> RemotePeer:
        peer = await start_process("transport.peer")
        peer.address = bytes.fromhex(await peer.answer())
        return peer

    return start


@pytest.fixture
def start_worker(start_process: Callable[..., Awaitable[RemotePeer]]) -> StartWorker:
    """Starts processes with one end of the handover: "prefill" or "decode"."""

    async def start(role: str) -> RemotePeer:
        worker = await start_process("handover.worker", role)
        assert await worker.answer() == "ready"
        return worker

    return start
