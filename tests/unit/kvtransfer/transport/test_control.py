"""Control connections of torch.distributed's pairs: what a stranger announces holds up nothing."""

from __future__ import annotations

import asyncio
import struct
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvtransfer.transport.torch_distributed.address import DataAddress
from kvtransfer.transport.torch_distributed.control import ConnectorControl, ListenerControl
from kvtransfer.transport.torch_distributed.pair import Arrival, Pair
from pdserve.base.errors import PeerLost
from tests.support.callbacks import LIMIT_S, watched_callbacks
from tests.support.redis import eventually

ANNOUNCED = struct.pack("<QQ", 7, 2**40)


class Transport(asyncio.Transport):
    """Notes whether it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.is_read = True

    def pause_reading(self) -> None:
        self.is_read = False

    def resume_reading(self) -> None:
        self.is_read = True


class Listener:
    """Has all announced messages under way until they `land`."""

    def __init__(self) -> None:
        self.tags: list[int] = []
        self.pair = Pair(cast(asyncio.Transport, None), cast(Any, SimpleNamespace()))

    def accept(self, control: asyncio.Transport) -> Pair:
        return self.pair

    def announced(self, pair: Pair, tag: int, num_bytes: int) -> None:
        self.tags.append(tag)
        (pair.arrivals.add if self.tags[1:] else pair.queue.append)(Arrival(pair, tag, num_bytes))

    def lose(self, pair: Pair) -> None:
        pair.lost = True


async def has_announced(listener: Listener, count: int) -> bool:
    return len(listener.tags) >= count


async def test_a_flood_of_announcements_holds_no_event_loop_and_is_read_no_further_than_messages_land() -> None:
    listener, transport = Listener(), Transport()
    control = ListenerControl(listener)
    control.connection_made(transport)
    with watched_callbacks() as longest:
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(control.data_received, ANNOUNCED * 50_000)
        await eventually(lambda: has_announced(listener, 8192))
    assert longest.seconds < LIMIT_S, longest.callback
    assert (len(listener.tags), transport.is_read) == (8192, False)
    listener.pair.arrivals.clear()
    listener.pair.queue.clear()
    await eventually(lambda: has_announced(listener, 16_384))
    control.connection_lost(None)


async def test_announcements_come_however_they_are_cut() -> None:
    listener = Listener()
    control = ListenerControl(listener)
    control.connection_made(Transport())
    for start in range(0, 160, 7):
        control.data_received((ANNOUNCED * 10)[start : start + 7])
    assert listener.tags == [7] * 10


async def test_a_listener_that_goes_on_after_its_greeting_fills_no_memory() -> None:
    control = ConnectorControl()
    for _ in range(1000):
        control.data_received(b"x" * 1000)
    assert control.greeting.done()
    assert len(control._unread) <= 1000


@pytest.mark.parametrize("port", ["0", "65536", "9" * 5000, "²", "-1", ""])
def test_what_is_no_port_is_no_data_address(port: str) -> None:
    for address in (f"pdnccl2 h - {port} 1", f"pdnccl2 h - 1 {port}"):
        with pytest.raises(PeerLost):
            DataAddress.unpack(address.encode())
