"""The contract of all transports, within one process: the same tests for ucx, nccl (gloo and NCCL) and inproc."""

from __future__ import annotations

import asyncio
import random
import threading
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.transport import TRANSPORTS, Buffer, Transport
from kvtransfer.transport.torch_distributed import gloo, nccl, pair_link
from pdserve.base.errors import PeerLost, TransferError
from tests.integration.kvtransfer.conftest import OpenTransport
from tests.integration.kvtransfer.memory import payload_of
from tests.integration.kvtransfer.opening import BETWEEN_GPUS, WITH_LOCAL, open_any

pytestmark = pytest.mark.parametrize("transport_name", [*TRANSPORTS, WITH_LOCAL, BETWEEN_GPUS])


def empty(size: int) -> Buffer:
    return np.zeros(size, np.uint8)


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def cross(receiver: Transport, sender: Transport) -> None:
    """Transfers a message, so that everything sent before it has arrived."""
    peer = await sender.connect(await receiver.listen())
    tag = random.getrandbits(63)
    receive = receiver.post_receive(tag, empty(1))
    await sender.post_send(peer, tag, payload_of(tag, 1))
    await receive


@pytest.mark.parametrize("size", [1, 2, 4095, 8192, 8193, 368_640, 8 << 20])
async def test_a_message_arrives_as_it_was_sent(start_transport: OpenTransport, size: int) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    receive = receiver.post_receive(5, empty(size))
    await sender.post_send(peer, 5, payload_of(5, size))
    await receive
    assert np.array_equal(receive.buffer, payload_of(5, size))


@pytest.mark.parametrize("tag", [0, 1, (1 << 31) - 1, 1 << 31, (1 << 63) + 7, (1 << 64) - 1])
async def test_every_64_bit_tag_works(start_transport: OpenTransport, tag: int) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    receive = receiver.post_receive(tag, empty(100))
    await sender.post_send(peer, tag, payload_of(tag, 100))
    await receive
    assert np.array_equal(receive.buffer, payload_of(tag, 100))


async def test_messages_are_matched_by_tag_and_not_by_order(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    tags = list(range(1 << 40, (1 << 40) + 40))
    receives = [receiver.post_receive(tag, empty(9000 + tag % 100)) for tag in tags]
    order = random.Random(1).sample(tags, len(tags))
    sends = [sender.post_send(peer, tag, payload_of(tag, 9000 + tag % 100)) for tag in order]
    for operation in (*receives, *sends):
        await operation
    for tag, receive in zip(tags, receives, strict=True):
        assert np.array_equal(receive.buffer, payload_of(tag, 9000 + tag % 100))


async def test_a_thousand_receives_can_be_outstanding(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    receives = [receiver.post_receive(tag, empty(64)) for tag in range(1000)]
    peer = await sender.connect(await receiver.listen())
    sends = [sender.post_send(peer, tag, payload_of(tag, 64)) for tag in range(1000)]
    for operation in (*sends, *receives):
        await operation
    assert all(np.array_equal(receive.buffer, payload_of(receive.tag, 64)) for receive in receives)


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_message_sent_before_its_receive_is_posted_waits(start_transport: OpenTransport, size: int) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    send = sender.post_send(peer, 1, payload_of(1, size))
    await cross(receiver, sender)
    receive = receiver.post_receive(1, empty(size))
    await receive
    await send
    assert np.array_equal(receive.buffer, payload_of(1, size))


@pytest.mark.parametrize("size", [10, 100_000])
async def test_a_message_for_a_cancelled_receive_never_lands(start_transport: OpenTransport, size: int) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    kept, cancelled = receiver.post_receive(1, empty(size)), receiver.post_receive(2, empty(size))
    await receiver.cancel([cancelled])
    assert cancelled.cancelled
    late = sender.post_send(peer, 2, payload_of(2, size))
    await sender.post_send(peer, 1, payload_of(1, size))
    await kept
    await late  # Dropped at the receiver: the sender does not wait.
    await cross(receiver, sender)
    assert not cancelled.buffer.any()
    assert np.array_equal(kept.buffer, payload_of(1, size))


async def test_buffers_are_not_written_after_a_cancel_during_the_transfer(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    size = 1 << 20
    receives = [receiver.post_receive(tag, empty(size)) for tag in range(16)]
    sends = [sender.post_send(peer, tag, payload_of(tag, size)) for tag in range(16)]
    await receives[3]
    await receiver.cancel(receives)
    assert all(receive.done for receive in receives)
    for receive in receives:
        receive.buffer[:] = 7  # The block now belongs to another request.
    for send in sends:
        await send
    await cross(receiver, sender)
    assert all((receive.buffer == 7).all() for receive in receives)


async def test_cancel_of_a_finished_receive_does_nothing(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    receive = receiver.post_receive(1, empty(8))
    await sender.post_send(peer, 1, payload_of(1, 8))
    await receive
    await receiver.cancel([receive])
    assert not receive.cancelled
    assert np.array_equal(receive.buffer, payload_of(1, 8))


async def test_a_tag_can_be_posted_again_after_a_cancel(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    await receiver.cancel([receiver.post_receive(1, empty(8))])
    receive = receiver.post_receive(1, empty(8))
    await sender.post_send(peer, 1, payload_of(1, 8))
    await receive
    assert np.array_equal(receive.buffer, payload_of(1, 8))


async def test_two_senders_interleave_into_one_receiver(start_transport: OpenTransport) -> None:
    one, two, receiver = start_transport(), start_transport(), start_transport()
    address = await receiver.listen()
    peers = {one: await one.connect(address), two: await two.connect(address)}
    receives = [receiver.post_receive(tag, empty(50_000)) for tag in range(40)]
    sends = [
        sender.post_send(peers[sender], tag, payload_of(tag, 50_000))
        for tag, sender in zip(range(40), [one, two] * 20, strict=True)
    ]
    for operation in (*receives, *sends):
        await operation
    assert all(np.array_equal(receive.buffer, payload_of(receive.tag, 50_000)) for receive in receives)


@pytest.mark.parametrize(("sent", "posted"), [(100, 99), (100, 101), (20_000, 10_000), (20_000, 40_000)])
async def test_a_message_of_another_size_fails_the_receive_and_writes_nothing(
    start_transport: OpenTransport, sent: int, posted: int
) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    receive = receiver.post_receive(1, empty(posted))
    await sender.post_send(peer, 1, payload_of(1, sent))
    with pytest.raises(TransferError, match=f"{sent} bytes came for a receive of {posted}"):
        await receive
    assert not receive.buffer.any()
    await cross(receiver, sender)


async def test_a_tag_cannot_be_posted_twice(start_transport: OpenTransport) -> None:
    receiver = start_transport()
    receiver.post_receive(1, empty(8))
    with pytest.raises(ValueError, match="outstanding"):
        receiver.post_receive(1, empty(8))


async def test_sending_to_a_disconnected_peer_fails_at_once(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    sender.disconnect(peer)
    assert peer.closed
    with pytest.raises(PeerLost):
        await sender.post_send(peer, 1, payload_of(1, 8))
    again = await sender.connect(await receiver.listen())
    receive = receiver.post_receive(2, empty(8))
    await sender.post_send(again, 2, payload_of(2, 8))
    await receive


async def test_a_malformed_address_is_refused(start_transport: OpenTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (pair_link, gloo, nccl):
        monkeypatch.setattr(module, "RENDEZVOUS_TIMEOUT", timedelta(seconds=2))
    sender, receiver = start_transport(), start_transport()
    address = await receiver.listen()
    for broken in (b"x", address[:-3], b"y" * 200, address[:-1] + bytes([address[-1] ^ 255])):
        with pytest.raises(PeerLost):
            await sender.connect(broken)


async def test_cancelling_a_waiting_task_does_not_affect_the_operation(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    receive = receiver.post_receive(1, empty(8))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(receive, timeout=0.01)
    assert not receive.done
    await sender.post_send(peer, 1, payload_of(1, 8))
    await receive
    assert np.array_equal(receive.buffer, payload_of(1, 8))


async def test_close_fails_outstanding_receives(start_transport: OpenTransport) -> None:
    receiver = start_transport()
    await receiver.listen()
    receives = [receiver.post_receive(tag, empty(8)) for tag in range(3)]
    await receiver.close()
    assert all(isinstance(receive.error, PeerLost) for receive in receives)


async def test_close_leaves_no_thread_and_no_descriptor(transport_name: str) -> None:
    async def use() -> None:
        sender, receiver = open_any(transport_name), open_any(transport_name)
        peer = await sender.connect(await receiver.listen())
        receives = [receiver.post_receive(tag, empty(100_000)) for tag in range(4)]
        for tag in range(3):  # The last receive stays outstanding.
            await sender.post_send(peer, tag, payload_of(tag, 100_000))
            await receives[tag]
        await sender.close()
        await receiver.close()

    await use()  # Libraries open what they keep for the whole process on first use.
    threads, descriptors = set(threading.enumerate()), num_descriptors()
    for _ in range(3):
        await use()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=10)  # The one that reports the end is about to end itself.
        assert not thread.is_alive(), thread.name
    assert num_descriptors() <= descriptors
