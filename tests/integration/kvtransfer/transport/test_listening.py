"""Transports listen where `--host` says, and what arrives there unasked is bounded."""

from __future__ import annotations

import asyncio

import numpy as np
import psutil
import pytest

from kvtransfer.transport import Transport, open_transport, ucx
from kvtransfer.transport.base import LaneReporter

TIMEOUT_S = 30.0


def listening() -> set[str]:
    """Addresses that this process listens on."""
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.ip for each in connections if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("name", ["ucx", "nccl"])
async def test_a_transport_listens_on_loopback_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding 15: UCX listened on all devices, and torch's store on every address."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    before = listening()
    transport = open_transport(name, host="127.0.0.1")
    try:
        await transport.listen()
        assert listening() - before <= {"127.0.0.1"}
        assert "127.0.0.1" in listening()
    finally:
        await transport.close()


async def _sent(sender: Transport, receiver: Transport, size: int) -> int:
    """The tag of a message that has left, and that nothing waits for."""
    peer = await sender.connect(await receiver.listen())
    async with asyncio.timeout(TIMEOUT_S):
        await sender.post_send(peer, size, np.ones(size, np.uint8))
    return size


async def _still_works(sender: Transport, receiver: Transport) -> None:
    peer = await sender.connect(await receiver.listen())
    receive = receiver.post_receive(1, np.zeros(1 << 20, np.uint8))
    async with asyncio.timeout(TIMEOUT_S):
        await sender.post_send(peer, 1, np.ones(1 << 20, np.uint8))
        await receive
    assert receive.buffer.all()


async def test_blocks_within_a_host_are_still_read_from_the_senders_memory() -> None:
    sender, receiver = open_transport("ucx"), open_transport("ucx")
    try:
        assert isinstance(sender, LaneReporter)
        if "cma" not in sender.offered_lanes():
            pytest.skip("this machine does not allow process_vm_readv")
        assert "cma" in sender.lanes(await sender.connect(await receiver.listen()))
        await _still_works(sender, receiver)
    finally:
        await sender.close()
        await receiver.close()


async def test_early_messages_over_ucx_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding 15: 4,096 of any size were kept, and memory was allocated for whatever size a sender announced."""
    monkeypatch.setattr(ucx, "_MAX_EARLY_BYTES", 10_000)
    monkeypatch.setattr(ucx, "_DISCARD_BYTES", 1 << 16)
    sender, receiver = open_transport("ucx"), open_transport("ucx")
    assert isinstance(receiver, ucx.UcxTransport)
    try:
        for size in (4000, 4001, 4002, 1 << 16, 1 << 20, 8 << 20):
            await _sent(sender, receiver, size)
        await _still_works(sender, receiver)
        early = receiver._matcher._early
        assert set(early) == {4001, 4002}
        for tag in list(early):
            await receiver.post_receive(tag, np.empty(tag, np.uint8))
        assert receiver._discarded is not None
        assert receiver._discarded.nbytes == 1 << 16
    finally:
        await sender.close()
        await receiver.close()
