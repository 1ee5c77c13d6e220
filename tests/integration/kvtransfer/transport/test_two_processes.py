"""Transports between real processes, one of which may be killed or stopped."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest

from kvtransfer.transport import Operation, Transport
from pdserve.base.errors import PeerLost
from tests.integration.kvtransfer.conftest import OpenTransport, StartPeer
from tests.integration.kvtransfer.memory import Memory, payload_of
from tests.integration.kvtransfer.opening import ON_TWO_GPUS
from tests.integration.kvtransfer.processes import RemotePeer
from tests.support.deadline import DEADLINE_S
from tests.support.devices import two_gpus

pytestmark = pytest.mark.parametrize("transport_name", ["ucx", "nccl", pytest.param(ON_TWO_GPUS, marks=two_gpus)])

MIB = 1 << 20


async def within(seconds: float, operation: Operation) -> bool:
    """Whether the operation ends in that time, in success or failure."""
    done = asyncio.Event()
    operation.add_done_callback(lambda _: done.set())
    try:
        async with asyncio.timeout(seconds):
            await done.wait()
    except TimeoutError:
        return False
    return True


async def assert_can_receive(transport: Transport, memory: Memory, other: RemotePeer, tags: int) -> None:
    """Checks that messages arrive intact."""
    here = (await transport.listen()).hex()
    receives = [transport.post_receive(tags + i, memory.empty(MIB)) for i in range(16)]
    await other.command(f"send {here} {tags} 16 {MIB}")
    for receive in receives:
        assert await within(DEADLINE_S, receive)
        assert receive.error is None
        assert np.array_equal(memory.read(receive.buffer), payload_of(receive.tag, MIB))


@pytest.mark.parametrize("size", [1, 368_640, 8 * MIB])
async def test_messages_cross_processes_both_ways(
    start_transport: OpenTransport, start_peer: StartPeer, memory: Memory, size: int
) -> None:
    transport, other = start_transport(), await start_peer()
    here = (await transport.listen()).hex()
    receives = [transport.post_receive(tag, memory.empty(size)) for tag in range(8)]
    await other.command(f"send {here} 0 8 {size}")
    for tag, receive in enumerate(receives):
        await receive
        assert np.array_equal(memory.read(receive.buffer), payload_of(tag, size))
    peer = await transport.connect(other.address)
    for tag in range(100, 108):
        await other.command(f"receive {tag} {size}")
    sends = [transport.post_send(peer, tag, memory.payload(tag, size)) for tag in range(100, 108)]
    for tag in reversed(range(100, 108)):
        assert await other.command(f"await {tag}") == "right"
    for send in sends:
        await send


async def test_a_receiver_killed_during_a_transfer_costs_only_messages_to_it(
    start_transport: OpenTransport, start_peer: StartPeer, memory: Memory
) -> None:
    transport, victim, survivor = start_transport(), await start_peer(), await start_peer()
    to_victim, to_survivor = await transport.connect(victim.address), await transport.connect(survivor.address)
    await victim.command(f"receive 0 {4 * MIB}")
    for tag in range(4):
        await survivor.command(f"receive {tag} {MIB}")
    payload = memory.payload(0, 4 * MIB)
    sends = [transport.post_send(to_victim, tag, payload) for tag in range(64)]
    await sends[0]
    await victim.kill()
    await transport.post_send(to_survivor, 0, memory.payload(0, MIB))
    assert await survivor.command("await 0") == "right"

    # After the disconnect the buffers are free, whether or not the transport noticed the death.
    transport.disconnect(to_victim)
    for send in sends:
        assert await within(DEADLINE_S, send)
    assert isinstance(sends[-1].error, PeerLost)

    for tag in range(1, 4):
        await transport.post_send(to_survivor, tag, memory.payload(tag, MIB))
        assert await survivor.command(f"await {tag}") == "right"
    # The same worker, restarted: another process, another address, another peer.
    restarted = await start_peer()
    to_restarted = await transport.connect(restarted.address)
    await restarted.command(f"receive 7 {MIB}")
    await transport.post_send(to_restarted, 7, memory.payload(7, MIB))
    assert await restarted.command("await 7") == "right"


async def test_buffers_of_a_killed_sender_are_not_written_after_cancel(
    start_transport: OpenTransport, start_peer: StartPeer, memory: Memory
) -> None:
    transport, victim, survivor = start_transport(), await start_peer(), await start_peer()
    here = (await transport.listen()).hex()
    receives = [transport.post_receive(tag, memory.empty(MIB)) for tag in range(64)]
    victim.say(f"send {here} 0 64 {MIB}")
    await receives[2]
    await victim.kill()
    async with asyncio.timeout(DEADLINE_S):
        await transport.cancel(receives)
    assert all(receive.done for receive in receives)
    for receive in receives:
        memory.fill(receive.buffer, 9)
    await assert_can_receive(transport, memory, survivor, 1000)
    assert all((memory.read(receive.buffer) == 9).all() for receive in receives)


async def test_disconnecting_a_stopped_receiver_frees_its_buffers_and_blocks_no_other_peer(
    start_transport: OpenTransport, start_peer: StartPeer, memory: Memory
) -> None:
    transport, stopped, survivor = start_transport(), await start_peer(), await start_peer()
    to_stopped = await transport.connect(stopped.address)
    await stopped.command("receive 0 10")
    await transport.post_send(to_stopped, 0, memory.payload(0, 10))
    os.kill(stopped.pid, signal.SIGSTOP)
    sends = [transport.post_send(to_stopped, tag, memory.payload(tag, 8 * MIB)) for tag in range(8)]
    assert not await within(0.2, sends[-1])
    transport.disconnect(to_stopped)
    for send in sends:
        assert await within(DEADLINE_S, send)
        assert isinstance(send.error, PeerLost)
    to_survivor = await transport.connect(survivor.address)
    await survivor.command(f"receive 1 {MIB}")
    await transport.post_send(to_survivor, 1, memory.payload(1, MIB))
    assert await survivor.command("await 1") == "right"


@pytest.mark.slow
async def test_one_sender_after_another_can_be_killed(
    start_transport: OpenTransport, start_peer: StartPeer, memory: Memory
) -> None:
    """The kill hits a message at a random point. The survivor continues to receive, at the same address."""
    transport, survivor = start_transport(), await start_peer()
    here = (await transport.listen()).hex()
    for round_number in range(5):
        victim = await start_peer()
        first_tag = 10_000 * (round_number + 1)
        receives = [transport.post_receive(first_tag + i, memory.empty(MIB)) for i in range(200)]
        victim.say(f"send {here} {first_tag} 200 {MIB}")
        assert await within(DEADLINE_S, receives[round_number])
        await victim.kill()
        async with asyncio.timeout(DEADLINE_S):
            await transport.cancel(receives)
        await assert_can_receive(transport, memory, survivor, first_tag + 1000)
        assert (await transport.listen()).hex() == here
