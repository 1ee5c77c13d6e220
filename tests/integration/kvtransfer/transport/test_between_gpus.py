"""The `nccl` transport between GPUs, beyond what all transports share. A stand-in replaces GPUs and NCCL."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
import pytest

from kvtransfer.transport import Buffer, Operation, open_transport
from kvtransfer.transport.torch_distributed import nccl
from kvtransfer.transport.torch_distributed.nccl import NcclLinks
from kvtransfer.transport.torch_distributed.transport import TorchDistributedTransport
from pdserve.base.errors import PeerLost
from tests.integration.kvtransfer.memory import payload_of
from tests.support.deadline import DEADLINE_S
from tests.support.pretend_gpu import PretendGpu

T = TypeVar("T")
Start = Callable[..., TorchDistributedTransport]
SIZE = 10_000
HELLO = 1


@pytest.fixture
def gpus() -> tuple[PretendGpu, PretendGpu]:
    """The GPUs of the sender and of the receiver."""
    return PretendGpu(), PretendGpu()


@pytest.fixture
async def start(gpus: tuple[PretendGpu, PretendGpu]) -> AsyncIterator[Start]:
    """Opens transports. At the end closes them and checks that no thread is left."""
    opened: list[TorchDistributedTransport] = []

    def start(gpu: PretendGpu, *, drain_timeout_s: float = 5.0, **timeouts: float) -> TorchDistributedTransport:
        opened.append(TorchDistributedTransport(NcclLinks(gpu, **timeouts), drain_timeout_s=drain_timeout_s))
        return opened[-1]

    yield start
    for gpu in gpus:
        gpu.let_all()
    for transport in opened:
        await transport.close()
    for thread in threads():
        # With a slow name server, a thread may still be looking up its peer.
        await asyncio.to_thread(thread.join, 30)
    assert not threads()


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("nccl")]


def empty(size: int = SIZE) -> Buffer:
    return np.zeros(size, np.uint8)


def hold(gpus: tuple[PretendGpu, PretendGpu]) -> None:
    """Stops messages half-way."""
    for gpu in gpus:
        gpu.lets_through.clear()


def release(gpus: tuple[PretendGpu, PretendGpu]) -> None:
    for gpu in gpus:
        gpu.lets_through.set()


async def taken(queue: SimpleQueue[T]) -> T:
    """The next item that another thread puts into the queue."""
    return await asyncio.to_thread(queue.get, timeout=20)


async def assert_waits(*operations: Operation) -> None:
    """None of the operations ends for a while."""
    ended = asyncio.Event()
    for operation in operations:
        operation.add_done_callback(lambda _: ended.set())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ended.wait(), 0.1)


@asynccontextmanager
async def soon(act: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `act` on another thread, while the block may be blocking the event loop."""
    timer = threading.Timer(0.05, act)
    timer.start()
    yield
    timer.join()


@asynccontextmanager
async def given_up(connecting: Coroutine[Any, Any, object]) -> AsyncIterator[None]:
    """Connects during the block, then gives up."""
    task = asyncio.create_task(connecting)
    yield
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_next_messages_are_launched_while_one_is_under_way(
    start: Start, gpus: tuple[PretendGpu, PretendGpu]
) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    hold(gpus)
    receives = [receiver.post_receive(tag, empty(SIZE + tag)) for tag in range(6)]
    sends = [sender.post_send(peer, tag, payload_of(tag, SIZE + tag)) for tag in range(6)]
    for gpu in gpus:
        assert [await taken(gpu.launched) for _ in range(5)] == [HELLO, *(SIZE + tag for tag in range(4))]
    assert not any(operation.done for operation in (*sends, *receives))
    # The other two wait until a message has been transferred.
    assert gpus[0].launched.empty()
    release(gpus)
    for operation in (*sends, *receives):
        await operation
    assert all(np.array_equal(receive.buffer, payload_of(receive.tag, SIZE + receive.tag)) for receive in receives)


async def test_transfers_of_a_broken_pair_fail_once_they_have_left_the_gpu(
    start: Start, gpus: tuple[PretendGpu, PretendGpu]
) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    hold(gpus)
    for gpu in gpus:
        gpu.lets_abort.clear()
    receives = [receiver.post_receive(tag, empty()) for tag in range(6)]
    sends = [sender.post_send(peer, tag, payload_of(tag, SIZE)) for tag in range(6)]
    for gpu in gpus:
        for _ in range(5):
            await taken(gpu.launched)
    sender.disconnect(peer)
    for gpu in gpus:  # The other side sees the control connection end.
        await taken(gpu.aborts)
    await assert_waits(*sends[:4], *receives[:4])
    for gpu, operations in zip(gpus, (sends, receives), strict=True):
        gpu.lets_abort.set()
        for operation in operations:
            with pytest.raises(PeerLost):
                await operation
    for receive in receives:
        receive.buffer[:] = 7  # The block now belongs to another request.
    release(gpus)
    again = await sender.connect(await receiver.listen())
    receive = receiver.post_receive(9, empty())
    await sender.post_send(again, 9, payload_of(9, SIZE))
    await receive
    assert all((receive.buffer == 7).all() for receive in receives)


async def test_a_hanging_abort_holds_only_transfers_on_the_gpu(
    start: Start, gpus: tuple[PretendGpu, PretendGpu]
) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    hold(gpus)
    for gpu in gpus:
        gpu.lets_abort.clear()
    receives = [receiver.post_receive(tag, empty()) for tag in range(6)]
    sends = [sender.post_send(peer, tag, payload_of(tag, SIZE)) for tag in range(6)]
    for gpu in gpus:
        for _ in range(5):
            await taken(gpu.launched)
    sender.disconnect(peer)
    async with asyncio.timeout(DEADLINE_S):
        for operation in (*sends[4:], *receives[4:]):  # These were never launched.
            with pytest.raises(PeerLost):
                await operation
        await assert_waits(*sends[:4], *receives[:4])
        release(gpus)  # Their kernels end although the abort hangs.
        await receiver.cancel(receives)
        for operation in (*sends, *receives):
            with pytest.raises(PeerLost):
                await operation


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, AssertionError])
async def test_a_transfer_that_nccl_refused_fails_after_the_abort(
    start: Start, gpus: tuple[PretendGpu, PretendGpu], kind: type[Exception]
) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    gpus[0].nccl_error = kind("unhandled system error")
    gpus[0].lets_abort.clear()
    send = sender.post_send(peer, 1, payload_of(1, SIZE))
    await taken(gpus[0].aborts)
    await assert_waits(send)
    gpus[0].lets_abort.set()
    with pytest.raises(PeerLost, match="unhandled system error"):
        async with asyncio.timeout(DEADLINE_S):
            await send
    assert peer.closed


async def test_closing_waits_for_pairs_broken_off_before(start: Start, gpus: tuple[PretendGpu, PretendGpu]) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    gpus[0].lets_abort.clear()
    sender.disconnect(peer)
    for gpu in gpus:
        await taken(gpu.aborts)
    await receiver.close()
    assert "nccl-abort" in [thread.name for thread in threads()]
    async with soon(gpus[0].lets_abort.set):
        await sender.close()
        assert not threads()


async def test_closing_waits_once_for_all_pairs_whose_aborts_hang_and_delays_no_other_transport(
    start: Start, gpus: tuple[PretendGpu, PretendGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = start(gpus[0], close_timeout_s=0.1), start(gpus[1])
    waits: list[dict[str, float]] = []

    async def wait(over: list[asyncio.Future[None]], **limit: float) -> None:
        waits.append(limit)
        await wait_for_all(over, **limit)

    wait_for_all = asyncio.wait
    monkeypatch.setattr(asyncio, "wait", wait)
    for _ in range(4):
        await sender.connect(await receiver.listen())
    others = start(PretendGpu()), start(PretendGpu())
    peer = await others[0].connect(await others[1].listen())
    gpus[0].lets_abort.clear()
    closing = asyncio.ensure_future(sender.close())
    receive = others[1].post_receive(1, empty())
    await others[0].post_send(peer, 1, payload_of(1, SIZE))
    await receive
    await closing
    assert waits == [{"timeout": 0.1}]


async def test_nothing_lands_after_closing(start: Start, gpus: tuple[PretendGpu, PretendGpu]) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    hold(gpus)
    for tag in range(6):
        sender.post_send(peer, tag, payload_of(tag, SIZE))
    for _ in range(5):
        await taken(gpus[1].launched)
    early = receiver.post_receive(0, empty())
    release(gpus)
    for _ in range(2):
        # Blocks the event loop. When the last message is launched, the first has landed and is reported.
        gpus[1].launched.get(timeout=20)
    await receiver.close()
    assert isinstance(early.error, PeerLost)
    assert not early.buffer.any()
    assert all(thread.name != "nccl-copy" for thread in threads())


async def test_a_message_that_stops_half_way_is_aborted_by_cancel(
    start: Start, gpus: tuple[PretendGpu, PretendGpu]
) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1], drain_timeout_s=0.05)
    peer = await sender.connect(await receiver.listen())
    hold(gpus)
    receive = receiver.post_receive(1, empty())
    send = sender.post_send(peer, 1, payload_of(1, SIZE))
    for gpu in gpus:
        assert [await taken(gpu.launched), await taken(gpu.launched)] == [HELLO, SIZE]
    await receiver.cancel([receive])
    assert isinstance(receive.error, PeerLost)
    receive.buffer[:] = 7
    release(gpus)
    with pytest.raises(PeerLost):
        await send
    assert peer.closed
    assert (receive.buffer == 7).all()


async def test_a_message_that_times_out_costs_the_pair(start: Start, gpus: tuple[PretendGpu, PretendGpu]) -> None:
    sender, receiver = start(gpus[0], transfer_timeout_s=0.05), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    hold(gpus)
    receive = receiver.post_receive(1, empty())
    with pytest.raises(PeerLost):
        await sender.post_send(peer, 1, payload_of(1, SIZE))
    assert peer.closed
    with pytest.raises(PeerLost):
        await receive


async def test_two_processes_on_one_gpu_are_refused_with_advice(start: Start) -> None:
    shared = PretendGpu("GPU-12")
    sender, receiver = start(shared), start(shared)
    with pytest.raises(PeerLost, match=r"two processes on one GPU: 127.0.0.1 .* both on GPU-12. Use --transport ucx"):
        await sender.connect(await receiver.listen())
    assert not receiver._pairs


@pytest.mark.parametrize("here", ["host", "GPU"])
async def test_tiers_with_buffers_in_different_memory_are_refused_with_advice(
    start: Start, gpus: tuple[PretendGpu, PretendGpu], here: str
) -> None:
    between_gpus, in_host_memory = start(gpus[0]), open_transport("nccl")
    try:
        sender, receiver = (in_host_memory, between_gpus) if here == "host" else (between_gpus, in_host_memory)
        with pytest.raises(PeerLost, match=f"and this process in {here} memory. .* same --handover-memory"):
            await sender.connect(await receiver.listen())
    finally:
        await in_host_memory.close()


async def test_connecting_fails_when_the_first_message_fails(start: Start, gpus: tuple[PretendGpu, PretendGpu]) -> None:
    gpus[1].has_memory = False
    sender, receiver = start(gpus[0]), start(gpus[1])
    gpus[0].make_limit_s = 10
    with pytest.raises(PeerLost):
        async with asyncio.timeout(5):
            await sender.connect(await receiver.listen())
    gpus[1].has_memory = True
    await sender.connect(await receiver.listen())


async def test_connecting_to_a_listener_that_does_not_answer_times_out(
    start: Start, gpus: tuple[PretendGpu, PretendGpu]
) -> None:
    gpus[1].lets_allocate.clear()
    sender, receiver = start(gpus[0], connect_timeout_s=0.2), start(gpus[1])
    with pytest.raises(PeerLost, match="did not answer"):
        await sender.connect(await receiver.listen())
    async with soon(gpus[1].lets_allocate.set):
        await receiver.close()


async def test_nccl_is_not_called_before_both_sides_have_their_memory(
    start: Start, gpus: tuple[PretendGpu, PretendGpu]
) -> None:
    gpus[1].lets_allocate.clear()
    sender, receiver = start(gpus[0]), start(gpus[1])
    async with given_up(sender.connect(await receiver.listen())):
        for gpu in gpus:
            await taken(gpu.requested)
    for gpu in gpus:
        await taken(gpu.aborts)
    # A side that its peer has given up does not call NCCL either when it gets its memory.
    gpus[1].lets_allocate.set()
    for transport in (sender, receiver):
        await transport.close()
    assert all(gpu.makes.empty() for gpu in gpus)


async def test_a_communicator_created_after_an_abort_is_aborted_too(
    start: Start, gpus: tuple[PretendGpu, PretendGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_CREATE_S", 0.002)
    gpus[1].lets_make.clear()
    sender, receiver = start(gpus[0]), start(gpus[1])
    async with given_up(sender.connect(await receiver.listen())):
        for gpu in gpus:
            await taken(gpu.makes)
    for gpu in gpus:
        for _ in range(50):
            await taken(gpu.aborts)  # No effect: there is no communicator yet.
    gpus[1].lets_make.set()
    # The fixture checks that all threads end, including those that wait for the first message.


async def test_creating_a_communicator_may_take_longer_than_other_calls(
    start: Start, gpus: tuple[PretendGpu, PretendGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_CALL_S", 0.001)
    gpus[1].lets_make.clear()
    sender, receiver = start(gpus[0]), start(gpus[1])
    async with given_up(sender.connect(await receiver.listen())):
        for gpu in gpus:
            await taken(gpu.makes)
    with pytest.raises(Empty):
        await asyncio.to_thread(gpus[1].aborts.get, timeout=0.1)
    gpus[1].lets_make.set()
    await taken(gpus[1].aborts)


async def test_transferred_buffers_are_not_kept_alive(start: Start, gpus: tuple[PretendGpu, PretendGpu]) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    freed = [threading.Event() for _ in range(2)]

    async def transfer() -> None:
        receive = receiver.post_receive(1, empty())
        send = sender.post_send(peer, 1, payload_of(1, SIZE))
        for operation, event in zip((send, receive), freed, strict=True):
            weakref.finalize(operation.buffer, event.set)
            await operation

    await transfer()
    for event in freed:
        assert await asyncio.to_thread(event.wait, 5)


async def test_an_early_message_is_received_after_its_copy(start: Start, gpus: tuple[PretendGpu, PretendGpu]) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    gpus[1].lets_copy.clear()
    await sender.post_send(peer, 1, payload_of(1, SIZE))
    posted = receiver.post_receive(2, empty(1))
    await sender.post_send(peer, 2, payload_of(2, 1))
    await posted  # So the first has arrived, too.
    receive = receiver.post_receive(1, empty())
    cancelling = asyncio.ensure_future(receiver.cancel([receive]))
    for _ in range(2):
        await taken(gpus[1].looks)
    assert not receive.done
    assert not cancelling.done()
    gpus[1].lets_copy.set()
    await cancelling
    assert not receive.cancelled
    assert np.array_equal(receive.buffer, payload_of(1, SIZE))


async def test_unwanted_messages_share_their_memory(start: Start, gpus: tuple[PretendGpu, PretendGpu]) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    receives = [receiver.post_receive(tag, empty()) for tag in range(5)]
    await receiver.cancel(receives[:4])
    for tag in range(5):
        await sender.post_send(peer, tag, payload_of(tag, SIZE))
    await receives[4]
    assert gpus[1].allocated == [HELLO, SIZE]
    assert np.array_equal(receives[4].buffer, payload_of(4, SIZE))


async def test_the_number_of_early_messages_is_bounded(start: Start, gpus: tuple[PretendGpu, PretendGpu]) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    num_early = NcclLinks.max_early + 1
    for tag in range(num_early):
        await sender.post_send(peer, tag, payload_of(tag, SIZE))
    posted = receiver.post_receive(100, empty(1))
    await sender.post_send(peer, 100, payload_of(100, 1))
    await posted
    oldest, next_oldest = receiver.post_receive(0, empty()), receiver.post_receive(1, empty())
    await next_oldest
    assert np.array_equal(next_oldest.buffer, payload_of(1, SIZE))
    assert not oldest.done


async def test_the_bytes_of_early_messages_are_bounded(
    start: Start, gpus: tuple[PretendGpu, PretendGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NcclLinks, "max_unmatched_bytes", 2 * SIZE)
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    for tag in range(3):
        await sender.post_send(peer, tag, payload_of(tag, SIZE))
    posted = receiver.post_receive(100, empty(3 * SIZE))
    await sender.post_send(peer, 100, payload_of(100, 3 * SIZE))  # A message with a waiting receive may be larger.
    await posted
    oldest, *others = (receiver.post_receive(tag, empty()) for tag in range(3))
    for receive in others:
        await receive
        assert np.array_equal(receive.buffer, payload_of(receive.tag, SIZE))
    assert not oldest.done


@pytest.mark.parametrize("posted_bytes", [None, SIZE])
async def test_a_large_unmatched_message_costs_the_pair(
    start: Start, gpus: tuple[PretendGpu, PretendGpu], monkeypatch: pytest.MonkeyPatch, posted_bytes: int | None
) -> None:
    monkeypatch.setattr(NcclLinks, "max_unmatched_bytes", 2 * SIZE)
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    receive = None if posted_bytes is None else receiver.post_receive(1, empty(posted_bytes))
    with pytest.raises(PeerLost):
        await sender.post_send(peer, 1, payload_of(1, 2 * SIZE + 1))
    assert gpus[1].allocated == [HELLO]
    if receive is not None:
        with pytest.raises(PeerLost, match="A message of 20001 bytes came for a receive of 10000"):
            await receive


async def test_unwanted_messages_of_two_pairs_share_their_memory(
    start: Start, gpus: tuple[PretendGpu, PretendGpu]
) -> None:
    senders, receiver = (start(gpus[0]), start(gpus[0])), start(gpus[1])
    receives = [receiver.post_receive(tag, empty()) for tag in range(2)]
    await receiver.cancel(receives)
    for tag, sender in enumerate(senders):
        peer = await sender.connect(await receiver.listen())
        await sender.post_send(peer, tag, payload_of(tag, SIZE))
    assert gpus[1].allocated == [HELLO, SIZE, HELLO]


async def test_an_early_message_without_memory_costs_the_pair(
    start: Start, gpus: tuple[PretendGpu, PretendGpu]
) -> None:
    sender, receiver = start(gpus[0]), start(gpus[1])
    peer = await sender.connect(await receiver.listen())
    gpus[1].has_memory = False
    with pytest.raises(PeerLost):
        await sender.post_send(peer, 1, payload_of(1, SIZE))
    assert peer.closed
