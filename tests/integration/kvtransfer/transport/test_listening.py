"""Transports listen where `--host` says, and what arrives there unasked is bounded."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys

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


async def test_a_connected_pair_over_gloo_listens_at_its_host_only() -> None:
    """Control connection, torch's store, and gloo itself, which opens a port per pair when two processes connect.

    Fails where `create_device` of gloo gets another host name, and where the store gets no listener of ours.
    """
    before = listening()
    sender, receiver = (open_transport("nccl", host="127.0.0.2") for _ in range(2))
    try:
        await _still_works(sender, receiver)
        assert listening() - before == {"127.0.0.2"}
    finally:
        await sender.close()
        await receiver.close()


#: Pins the ports of its own network, then prints those on which a connected pair listens.
_PINNED = """
import asyncio, fcntl, socket, struct
from pathlib import Path
UP, SET_FLAGS = 1, 0x8914
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SET_FLAGS, struct.pack("16sh", b"lo", UP))
Path("/proc/sys/net/ipv4/ip_local_port_range").write_text("19700 19739")
import psutil
from kvtransfer.transport import open_transport
from tests.integration.kvtransfer.transport.test_listening import _still_works

async def main():
    sender, receiver = open_transport("nccl"), open_transport("nccl")
    await _still_works(sender, receiver)
    found = psutil.Process().net_connections("tcp")
    print(*sorted(each.laddr.port for each in found if each.status == psutil.CONN_LISTEN))
    await sender.close()
    await receiver.close()

asyncio.run(main())
"""


@pytest.mark.slow
def test_the_range_of_the_system_pins_every_port_of_torch() -> None:
    """Gloo takes no port from its caller: `net.ipv4.ip_local_port_range` of the network's namespace is the way."""
    unshare = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], check=False).returncode != 0:
        pytest.skip("this machine does not allow namespaces to its users")
    command = [*unshare, sys.executable, "-c", _PINNED]
    ports = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout.split()
    # Of both ends: control connection and store, and one port of gloo each at least.
    assert len(ports) >= 4
    assert all(19700 <= int(port) <= 19739 for port in ports), ports


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
