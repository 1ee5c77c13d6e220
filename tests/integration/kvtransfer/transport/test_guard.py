"""Strangers at the TCP port of UCX: nothing that they send is read by UCX, and peers that introduce themselves work.

Strangers speak UCX's protocol. Two transports of this process stand for two workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.handover.introduction import Introduction, Introductions, answered
from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport import Peer
from kvtransfer.transport.own_sockets import Connection, tcp_sockets
from kvtransfer.transport.ucx import UcxTransport
from pdserve.base.errors import PeerLost
from pdserve.peers.tcp_filter import filter_refusal
from tests.support.handover import worker_pair
from tests.support.ucx_messages import CONNECT, put
from tests.support.ucx_stranger import stranger_at

needs_filters = pytest.mark.skipif(bool(filter_refusal()), reason="the kernel refuses filters on TCP sockets")
TIMEOUT_S = 30.0
#: Turns of the event loop, in each of which UCX is polled if something has arrived.
_TURNS = 50


@contextlib.asynccontextmanager
async def _open(*, guarded: bool) -> AsyncIterator[UcxTransport]:
    transport = UcxTransport(guarded=guarded)
    await transport.listen()
    try:
        yield transport
    finally:
        await transport.close()


async def _transfer(sender: UcxTransport, receiver: UcxTransport, tag: int) -> None:
    """Connects as the handover does, and sends a message large enough to be read from the sender's memory."""
    address, targets = await receiver.listen(), receiver.guard.addresses
    peer = await sender.connect(address)
    with sender.guard.introducing(targets) as own:
        assert own
        await receiver.guard.admit(own)
    sender.guard.confirm(own)
    await _send(sender, peer, receiver, tag)


async def _send(sender: UcxTransport, peer: Peer, receiver: UcxTransport, tag: int) -> None:
    receive = receiver.post_receive(tag, np.zeros(1 << 20, np.uint8))
    async with asyncio.timeout(TIMEOUT_S):
        await sender.post_send(peer, tag, np.full(1 << 20, tag, np.uint8))
        await receive
    assert (receive.buffer == tag).all()


async def _until(condition: Callable[[], bool]) -> None:
    """Lets UCX be polled until the condition holds."""
    async with asyncio.timeout(TIMEOUT_S):
        for _ in itertools.takewhile(lambda _: not condition(), itertools.count()):
            await asyncio.sleep(0.001)


async def test_ucx_itself_lets_a_stranger_write_to_its_memory() -> None:
    """What the guard is for: one message of UCX's protocol writes to any address, and nothing proves who sends it."""
    buffer = np.zeros(16, np.uint8)
    async with _open(guarded=False) as receiver:
        with stranger_at(*receiver.guard.addresses, CONNECT + put(buffer.ctypes.data, b"Z" * 16)):
            await _until(lambda: bool(buffer.any()))
    assert bytes(buffer) == b"Z" * 16


@needs_filters
async def test_a_stranger_writes_to_no_memory() -> None:
    """Fails without the filter on the listening socket."""
    buffer = np.zeros(16, np.uint8)
    data = CONNECT + put(buffer.ctypes.data, b"Z" * 16)
    async with _open(guarded=True) as receiver, _open(guarded=True) as sender:
        with stranger_at(*receiver.guard.addresses, data) as stranger:
            await _transfer(sender, receiver, 1)
            await _transfer(sender, receiver, 2)
            assert stranger.num_unread == len(data)
            assert [each.source for each in receiver.guard.strangers()] == [stranger.address]
    assert not buffer.any()


@needs_filters
async def test_a_stranger_writes_to_no_memory_over_a_connection_that_ucx_opened() -> None:
    """It listens where a worker did, for which a ticket is still valid. Fails without the filter on own connections."""
    buffer = np.zeros(16, np.uint8)
    async with _open(guarded=True) as sender:
        async with _open(guarded=True) as gone:
            address, targets = await gone.listen(), gone.guard.addresses
        [host, _, port] = next(iter(targets)).rpartition(":")
        with socket.create_server((host, int(port))) as impostor:
            await sender.connect(address)
            with sender.guard.introducing(targets) as own:
                connection, _ = impostor.accept()
            assert [each.target for each in own] == list(targets)
            with connection:
                # UCX is polled again, and waits for an answer.
                assert await asyncio.to_thread(connection.recv, len(CONNECT), socket.MSG_WAITALL)
                connection.sendall(put(buffer.ctypes.data, b"Z" * 16))
                for _ in range(_TURNS):
                    await asyncio.sleep(0.001)
    assert not buffer.any()


@needs_filters
async def test_blocks_pass_between_peers_that_are_guarded_or_not() -> None:
    for guarded in (False, True):
        async with _open(guarded=True) as receiver, _open(guarded=guarded) as sender:
            await _transfer(sender, receiver, 1)
            assert "tcp" in sender.offered_lanes()
            assert receiver.guard.strangers() == []


@needs_filters
async def test_only_the_new_connection_to_a_worker_is_named() -> None:
    """One that ended at the other end is listed here for a while. Fails if all are named: the worker waits in vain."""
    async with _open(guarded=True) as receiver, _open(guarded=True) as sender:
        await _transfer(sender, receiver, 1)
        address, targets = await receiver.listen(), receiver.guard.addresses
        opened = [each for each in tcp_sockets().values() if each.remote in targets]
        [old] = [Connection(each.local, each.remote) for each in opened]
        await sender.connect(address)
        with sender.guard.introducing(targets) as own:
            assert len(own) == 1
            assert old not in own


@needs_filters
async def test_a_worker_that_starts_again_at_its_address_is_called_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX then answers over a connection of its own. Fails without `answer_callbacks`, by its timeout."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    async with _open(guarded=True) as receiver:
        monkeypatch.setenv("UCX_TCP_PORT_RANGE", str(port))
        async with _open(guarded=True) as sender:
            await _transfer(sender, receiver, 1)
        async with _open(guarded=True) as sender, worker_pair() as pair:
            assert sender.guard.addresses == {f"127.0.0.1:{port}"}
            address, guarded = await receiver.listen(), tuple(receiver.guard.addresses)
            ticket = replace(await pair.grant([0]), data_address=address, guarded_addresses=guarded)
            called_back = list[Connection]()

            async def introduce(ticket: Ticket, introduction: Introduction) -> tuple[Connection, ...]:
                known = await answered(introduction, receiver.guard)
                called_back.extend(known)
                return known

            introductions = Introductions(sender, introduce)
            peer = await introductions.connect(ticket)
            answering = asyncio.create_task(introductions.answer_callbacks(ticket))
            await _send(sender, peer, receiver, 2)
            answering.cancel()
            assert [each.target for each in called_back] == [f"127.0.0.1:{port}"]


@needs_filters
async def test_a_connection_without_an_introduction_is_a_stranger() -> None:
    async with _open(guarded=True) as receiver:
        with stranger_at(*receiver.guard.addresses, b"") as stranger:
            expected = Connection(stranger.address, *receiver.guard.addresses)
            await _until(lambda: receiver.guard.strangers() == [expected])


@needs_filters
async def test_a_connection_is_ended_unless_it_was_introduced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also when it is not ended at its other end, where sent data waits. Fails without the sweep."""
    monkeypatch.setattr("kvtransfer.transport.ucx_guard._NAMED_WITHIN_S", 0.02)
    async with _open(guarded=True) as receiver, _open(guarded=True) as sender:
        address = await receiver.listen()
        with stranger_at(*receiver.guard.addresses, CONNECT) as stranger:
            await _transfer(sender, receiver, 1)
            await _until(lambda: stranger.address not in {each.remote for each in tcp_sockets().values()})
            await _transfer(sender, receiver, 2)
            assert await receiver.listen() == address


@needs_filters
async def test_a_connection_that_does_not_arrive_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a translation of addresses."""
    monkeypatch.setattr("kvtransfer.transport.ucx_guard._ARRIVAL_S", 0.0)
    async with _open(guarded=True) as receiver:
        [target] = receiver.guard.addresses
        with pytest.raises(PeerLost, match=r"No connection from 192\.0\.2\.1:9 reached UCX"):
            await receiver.guard.admit([Connection("192.0.2.1:9", target)])


@needs_filters
async def test_other_sockets_of_the_process_stay_as_they_are() -> None:
    """Fails if every socket that appears while UCX starts is shut."""
    with socket.create_server(("127.0.0.1", 0)) as server, _pair(server) as (client, accepted):
        async with _open(guarded=True):
            client.sendall(b"hello")
            assert accepted.recv(5) == b"hello"
        assert any(each.listens for each in tcp_sockets().values())


@contextlib.contextmanager
def _pair(server: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_connection(server.getsockname(), timeout=TIMEOUT_S) as client:
        accepted, _ = server.accept()
        with accepted:
            accepted.settimeout(TIMEOUT_S)
            yield client, accepted
