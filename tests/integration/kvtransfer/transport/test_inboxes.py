"""On every transport, messages wait at an inbox for memory, and end with it."""

from __future__ import annotations

import numpy as np
import pytest

from kvtransfer.transport import TRANSPORTS
from pdserve.base.errors import PeerLost
from tests.integration.kvtransfer.conftest import OpenTransport
from tests.integration.kvtransfer.inbox import NotingInbox
from tests.integration.kvtransfer.memory import payload_of
from tests.integration.kvtransfer.opening import BETWEEN_GPUS, WITH_LOCAL

pytestmark = pytest.mark.parametrize("transport_name", [*TRANSPORTS, WITH_LOCAL, BETWEEN_GPUS])
BASE = 5 << 20
#: Above what any of them sends without asking.
SIZE = 100_000


async def test_messages_get_their_memory_when_they_arrive(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    inbox = NotingInbox(receiver, BASE, SIZE)
    sends = [sender.post_send(peer, BASE + index, payload_of(index, SIZE)) for index in range(20)]
    for send in sends:
        await send
    for index in range(20):
        receive = inbox.posted[BASE + index]
        await receive
        assert np.array_equal(receive.buffer, payload_of(index, SIZE))


async def test_messages_wait_for_memory_and_keep_their_bytes(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    inbox = NotingInbox(receiver, BASE, SIZE, receives=False)
    sends = [sender.post_send(peer, BASE + index, payload_of(index, SIZE)) for index in range(6)]
    for num_posted in range(6):
        # Over gloo and NCCL one at a time; else it does not matter which is received first.
        await inbox.until_arrived(num_posted + 1)
        inbox.post(inbox.waiting[-1])
    for index in range(6):
        await inbox.posted[BASE + index]
        assert np.array_equal(inbox.posted[BASE + index].buffer, payload_of(index, SIZE))
    for send in sends:
        await send


async def test_an_inbox_that_is_dismissed_lets_its_senders_go(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    inbox = NotingInbox(receiver, BASE, SIZE, receives=False)
    other = NotingInbox(receiver, BASE + (1 << 20), SIZE)
    waiting = [sender.post_send(peer, BASE + index, payload_of(index, SIZE)) for index in range(3)]
    await inbox.until_arrived(1)
    receiver.dismiss(BASE)
    receiver.dismiss(BASE)
    late = sender.post_send(peer, BASE + 7, payload_of(7, SIZE))
    behind = sender.post_send(peer, BASE + (1 << 20), payload_of(8, SIZE))
    for send in (*waiting, late, behind):
        await send
    await other.until_arrived(1)
    await other.posted[BASE + (1 << 20)]
    assert np.array_equal(other.posted[BASE + (1 << 20)].buffer, payload_of(8, SIZE))
    assert inbox.waiting[0] == BASE
    assert inbox.posted == {}


async def test_a_message_that_is_not_wanted_is_dropped(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    inbox = NotingInbox(receiver, BASE, SIZE)
    inbox.unwanted.add(BASE + 1)
    for index in (1, 2):
        await sender.post_send(peer, BASE + index, payload_of(index, SIZE))
    await inbox.until_arrived(1)
    await inbox.posted[BASE + 2]
    assert list(inbox.posted) == [BASE + 2]


async def test_cancelled_receives_of_an_inbox_are_written_no_more(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    inbox = NotingInbox(receiver, BASE, SIZE, receives=False)
    sends = [sender.post_send(peer, BASE + index, payload_of(index, SIZE)) for index in range(4)]
    await inbox.until_arrived(1)
    receives = [inbox.post(tag) for tag in list(inbox.waiting)]
    receiver.dismiss(BASE)
    await receiver.cancel(receives)
    assert all(receive.done for receive in receives)
    for receive in receives:
        receive.buffer[:] = 7
    for send in sends:
        await send
    assert all((receive.buffer == 7).all() for receive in receives)


async def test_closing_reports_to_inboxes_that_nothing_arrives_any_more(start_transport: OpenTransport) -> None:
    sender, receiver = start_transport(), start_transport()
    peer = await sender.connect(await receiver.listen())
    inbox = NotingInbox(receiver, BASE, SIZE, receives=False)
    send = sender.post_send(peer, BASE, payload_of(0, SIZE))
    await inbox.until_arrived(1)
    await receiver.close()
    assert {type(error) for error in inbox.errors} == {PeerLost}
    sender.disconnect(peer)
    await send.ended()


async def test_two_inboxes_do_not_share_tags(start_transport: OpenTransport) -> None:
    receiver = start_transport()
    inbox = NotingInbox(receiver, BASE, SIZE)
    for base in (BASE, BASE + 1):
        with pytest.raises(ValueError, match="open already"):
            receiver.expect(base, inbox)
