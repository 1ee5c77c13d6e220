"""Offers within a host: what is mapped, who may offer, and when UCX is used instead."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from kvtransfer.handover.sender import Sender
from kvtransfer.transport import open_transport
from kvtransfer.transport.local import exchange as exchange_module
from kvtransfer.transport.local import packets
from kvtransfer.transport.local.address import LocalAddress
from kvtransfer.transport.local.exchange import LocalExchange
from kvtransfer.transport.local.socket_directory import SocketDirectory
from kvtransfer.transport.path import DataEndpoint
from kvtransfer.transport.with_local import WithLocal
from pdserve.base import gpu_memory, shared_memory
from pdserve.base.cuda_driver import CudaError
from pdserve.base.errors import PeerLost, SetupError
from pdserve.base.shared_memory import SharedMemory, map_to_read
from pdserve.peers.host_identity import own_host_identity
from pdserve.worker.kv_bytes.host_blocks import in_place
from tests.integration.kvtransfer.inbox import CopyingInbox, NotingInbox, one_block
from tests.integration.kvtransfer.memory import payload_of
from tests.support.deadline import DEADLINE_S
from tests.support.tickets import a_ticket

SIZE = 1 << 20


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory whose sockets have names that are short enough, which those of pytest need not have."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def directory(short_path: Path) -> SocketDirectory:
    return SocketDirectory(short_path)


@pytest.fixture
async def start(directory: SocketDirectory) -> AsyncIterator[Callable[..., LocalExchange]]:
    """Opens exchanges, whose GPU has the given number; closes them at the end."""
    opened: list[LocalExchange] = []

    def start(gpu: int | None = None) -> LocalExchange:
        opened.append(LocalExchange(directory, gpu))
        return opened[-1]

    yield start
    for transport in opened:
        await transport.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - nothing reports it
            await asyncio.sleep(0.002)


def mapped_to_read() -> int:
    """How many memories of other processes this one has mapped."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum("r--s" in line and "memfd:pdserve" in line for line in lines)


def times_open(path: str) -> int:
    """How many descriptors of this process are open files of that path."""
    return sum(str(each.readlink()) == path for each in Path("/proc/self/fd").iterdir() if each.is_symlink())


def filled(tag: int) -> SharedMemory:
    memory = SharedMemory(SIZE)
    memory.bytes[:] = payload_of(tag, SIZE)
    return memory


async def test_shared_memory_is_mapped_once_and_until_the_sender_has_gone(start: Callable[[], LocalExchange]) -> None:
    sender, receiver, memory = start(), start(), filled(1)
    sender.share(memory)
    peer = await sender.connect(receiver.listen())
    inbox = CopyingInbox(receiver.expect)
    for tag in range(20):
        await sender.offer(peer, memory, one_block(tag, 1000 * tag, 1000))
        assert np.array_equal(inbox.copied[tag], memory.bytes[1000 * tag : 1000 * (tag + 1)])
        assert mapped_to_read() == 1
    sender.disconnect(peer)
    await until(lambda: mapped_to_read() == 0)


async def test_memory_of_a_sender_that_has_gone_stays_until_its_last_copy(
    start: Callable[[], LocalExchange],
) -> None:
    sender, receiver, memory = start(), start(), filled(1)
    sender.share(memory)
    peer = await sender.connect(receiver.listen())
    inbox = CopyingInbox(receiver.expect, copies=False)
    offers = [sender.offer(peer, memory, one_block(tag, tag, 100)) for tag in range(2)]
    await inbox.until_offered(2)
    sender.disconnect(peer)
    assert all(isinstance(offer.error, PeerLost) for offer in offers)
    await until(lambda: not receiver._senders)
    assert mapped_to_read() == 1
    inbox.copy(0)
    assert mapped_to_read() == 1
    inbox.copy(1)
    await until(lambda: mapped_to_read() == 0)
    assert np.array_equal(inbox.copied[1], payload_of(1, SIZE)[1:101])


async def test_memory_that_is_no_longer_shared_is_unmapped(start: Callable[[], LocalExchange]) -> None:
    sender, receiver, lasting, probe = start(), start(), filled(1), filled(2)
    for memory in (lasting, probe):
        sender.share(memory)
    peer = await sender.connect(receiver.listen(), lasting)
    assert mapped_to_read() == 1
    await sender.offer(peer, probe, one_block(1, 0, 100))
    assert mapped_to_read() == 2
    sender.unshare(probe)
    await until(lambda: mapped_to_read() == 1)


async def test_memory_that_is_shared_later_is_shown_with_its_first_offer(start: Callable[[], LocalExchange]) -> None:
    sender, receiver, memory = start(), start(), filled(3)
    peer = await sender.connect(receiver.listen())
    inbox = CopyingInbox(receiver.expect)
    sender.share(memory)
    await sender.offer(peer, memory, one_block(5, 7, 50))
    assert np.array_equal(inbox.copied[5], memory.bytes[7:57])


async def test_a_peer_that_has_ended_unnoticed_keeps_no_memory_at_the_others(
    start: Callable[[], LocalExchange],
) -> None:
    sender, ended, receiver, lasting, probe = start(), start(), start(), filled(1), filled(2)
    for memory in (lasting, probe):
        sender.share(memory)
    for each in (ended, receiver):
        shown = await sender.connect(each.listen(), lasting)
        await sender.offer(shown, probe, one_block(1, 0, 100))
    for peer in list(ended._senders):  # Its end of file is not read before the next turn.
        peer._socket._socket.shutdown(socket.SHUT_RDWR)
    sender.unshare(probe)
    await until(lambda: [len(each._memories) for each in receiver._senders] == [1])


async def test_a_process_that_closes_unmaps_on_its_thread(start: Callable[[], LocalExchange]) -> None:
    sender, receiver, memory = start(), start(), filled(1)
    sender.share(memory)
    await sender.connect(receiver.listen(), memory)
    threads, [incoming] = list[str](), receiver._senders
    mapped = incoming._memories[0]
    weakref.finalize(mapped, lambda: threads.append(threading.current_thread().name))
    del mapped
    await receiver.close()
    assert threads == ["kv-mappings_0"]


async def test_offers_without_an_inbox_end_at_once(start: Callable[[], LocalExchange]) -> None:
    sender, receiver, memory = start(), start(), filled(1)
    sender.share(memory)
    peer = await sender.connect(receiver.listen())
    inbox = CopyingInbox(receiver.expect)
    await sender.offer(peer, memory, one_block(1 << 20, 0, 100))
    receiver.dismiss(0)
    await sender.offer(peer, memory, one_block(1, 0, 100))
    assert inbox.copied == {}


async def test_who_does_not_know_the_token_is_refused(start: Callable[[], LocalExchange]) -> None:
    sender, receiver = start(), start()
    address = receiver.listen()
    wrong = LocalAddress(directory=address.directory, name=address.name, token=bytes(32))
    with pytest.raises(PeerLost):
        await sender.connect(wrong)
    await sender.connect(address)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
async def test_another_user_is_refused(start: Callable[[], LocalExchange], directory: SocketDirectory) -> None:
    receiver = start()
    receiver.listen()
    path, token = directory.path / receiver.address.name, receiver.address.token
    for each in (path, path.parent):
        each.chmod(0o777)
    code = (
        "import os, socket, sys; os.setuid(12345); s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET);"
        "s.connect(sys.argv[1]); s.send(bytes.fromhex(sys.argv[2])); print(s.recv(9))"
    )
    process = await asyncio.create_subprocess_exec(
        *("python3", "-c", code, str(path), packets.hello(token, 0).hex()), stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(DEADLINE_S):
        output, _ = await process.communicate()
    assert output == b"b''\n"


def an_offer(**changes: object) -> bytes:
    """An offer of a block that lies in memory number 0, unless it is changed."""
    return packets.offer(0, replace(one_block(1, 0, 100), **changes))


@pytest.mark.parametrize(
    "packet",
    [
        b"?",
        packets.OFFER + bytes(5),
        packets.OFFER + bytes(36),
        an_offer()[:-1],
        packets.OFFER + b"\x01" + an_offer()[2:],  # Of a memory that was not shown.
        an_offer(starts=np.array([SIZE - 99])),
        an_offer(starts=np.array([0, -1])),
        an_offer(starts=np.array([(1 << 63) - 1])),
        an_offer(block_bytes=0),
        an_offer(block_bytes=(1 << 64) - 1),
        an_offer(num_messages=0),
        an_offer(num_messages=2),
        packets.MEMORY + bytes(12),
        packets.FORGET,
        packets.hello(bytes(32), 0),
    ],
)
async def test_a_sender_of_nonsense_is_cut_off_and_no_other_one(
    start: Callable[[], LocalExchange], directory: SocketDirectory, packet: bytes
) -> None:
    sender, receiver, memory = start(), start(), filled(1)
    sender.share(memory)
    peer = await sender.connect(receiver.listen())
    inbox, loop = CopyingInbox(receiver.expect), asyncio.get_running_loop()
    with directory.connect(receiver.address) as raw:
        raw.send(packets.hello(receiver.address.token, 1))
        socket.send_fds(raw, [packets.memory(0, SIZE)], [memory.file])
        async with asyncio.timeout(DEADLINE_S):
            assert await loop.sock_recv(raw, 9) == packets.WELCOME
            raw.send(packet)
            assert await loop.sock_recv(raw, 9) == b""
    await sender.offer(peer, memory, one_block(1, 0, 100))
    assert list(inbox.copied) == [1]


async def test_an_offer_of_another_release_is_refused_before_it_is_made(
    start: Callable[[], LocalExchange], directory: SocketDirectory
) -> None:
    """It then takes UCX. `H` is what the release before this one says."""
    receiver = start()
    receiver.listen()
    with directory.connect(receiver.address) as raw:
        raw.send(b"H" + packets.hello(receiver.address.token, 0)[1:])
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.get_running_loop().sock_recv(raw, 9) == b""


@pytest.mark.parametrize("kind", [packets.MEMORY, packets.GPU_MEMORY])
async def test_memory_that_could_shrink_or_that_is_a_gpus_is_not_mapped(
    start: Callable[[], LocalExchange], directory: SocketDirectory, kind: bytes
) -> None:
    """A reader behind its end would get SIGBUS. This process has no GPU."""
    receiver = start()
    receiver.listen()
    loop = asyncio.get_running_loop()
    file = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, SIZE)
    with pytest.raises(ValueError, match="shrink"):
        map_to_read(file, SIZE)
    with directory.connect(receiver.address) as raw:
        raw.send(packets.hello(receiver.address.token, 0))
        async with asyncio.timeout(DEADLINE_S):
            assert await loop.sock_recv(raw, 9) == packets.WELCOME
            socket.send_fds(raw, [packets.memory(0, SIZE, kind)], [file])
            assert (await loop.sock_recv(raw, 99)).startswith(packets.REFUSED)
            assert await loop.sock_recv(raw, 9) == b""
    os.close(file)
    assert mapped_to_read() == 0


class SlowGpu:
    """Pins memory for a GPU once it may. Implements what is used of `GpuDriver`."""

    def __init__(self) -> None:
        self.may_pin = threading.Event()
        self.error = ""
        self.pinned: set[int] = set()

    def pin(self, device: int, address: int, num_bytes: int, *, is_read_only: bool) -> int:
        assert device == 3
        assert is_read_only
        self.may_pin.wait(DEADLINE_S)
        if self.error:
            raise CudaError(self.error)
        self.pinned.add(address)
        return address

    def unpin(self, device: int, address: int) -> None:
        self.pinned.remove(address)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SlowGpu:
    found = SlowGpu()
    monkeypatch.setattr(gpu_memory, "open_driver", lambda: found)
    return found


def staged() -> SharedMemory:
    """Memory that GPUs access."""
    return SharedMemory(SIZE, is_pinned=True)


async def test_memory_for_a_gpu_is_pinned_on_a_thread_before_the_sender_is_welcome(
    start: Callable[..., LocalExchange], gpu: SlowGpu
) -> None:
    sender, receiver, memory = start(), start(3), staged()
    connecting = asyncio.create_task(sender.connect(receiver.listen(), memory))
    await sender.connect(receiver.address)  # The event loop goes on meanwhile.
    assert not connecting.done()
    gpu.may_pin.set()
    peer = await connecting
    assert peer.is_staged
    assert len(gpu.pinned) == 1
    sender.disconnect(peer)
    await until(lambda: not gpu.pinned)


async def test_a_gpu_that_cannot_pin_memory_refuses_the_sender(
    start: Callable[..., LocalExchange], gpu: SlowGpu
) -> None:
    sender, receiver = start(), start(3)
    gpu.error = "cuMemHostRegister_v2: CUDA_ERROR_NOT_SUPPORTED (801)"
    gpu.may_pin.set()
    with pytest.raises(PeerLost, match="NOT_SUPPORTED"):
        await sender.connect(receiver.listen(), staged())
    await sender.connect(receiver.address)
    await until(lambda: mapped_to_read() == 0)


async def test_a_process_without_a_gpu_refuses_memory_for_one(start: Callable[..., LocalExchange]) -> None:
    sender, receiver = start(), start()
    with pytest.raises(PeerLost, match="this worker has none"):
        await sender.connect(receiver.listen(), staged())


@pytest.mark.parametrize("ends", ["sender", "receiver"])
async def test_memory_that_is_being_pinned_when_its_connection_ends_is_let_go(
    start: Callable[..., LocalExchange], gpu: SlowGpu, ends: str
) -> None:
    sender, receiver = start(), start(3)
    connecting = asyncio.create_task(sender.connect(receiver.listen(), staged()))
    await until(lambda: any(each._is_pinning for each in receiver._senders))
    closing = asyncio.create_task({"sender": sender, "receiver": receiver}[ends].close())
    with pytest.raises(PeerLost):
        await connecting
    gpu.may_pin.set()
    await closing
    await until(lambda: not gpu.pinned and mapped_to_read() == 0)


@pytest.mark.parametrize("kind", [packets.MEMORY, packets.PINNED_MEMORY])
async def test_memory_behind_memory_that_is_being_pinned_cuts_its_sender_off(
    start: Callable[..., LocalExchange], directory: SocketDirectory, gpu: SlowGpu, kind: bytes
) -> None:
    receiver, memory = start(3), staged()
    receiver.listen()
    with directory.connect(receiver.address) as raw:
        raw.send(packets.hello(receiver.address.token, 2))
        for number, each in enumerate((packets.PINNED_MEMORY, kind)):
            socket.send_fds(raw, [packets.memory(number, SIZE, each)], [memory.file])
        async with asyncio.timeout(DEADLINE_S):
            assert await asyncio.get_running_loop().sock_recv(raw, 9) == b""
    gpu.may_pin.set()
    await until(lambda: not gpu.pinned and mapped_to_read() == 0)


async def test_memory_for_a_gpu_that_is_shown_later_cuts_its_sender_off(
    start: Callable[..., LocalExchange], directory: SocketDirectory, gpu: SlowGpu
) -> None:
    """Its offers would wait until it is pinned."""
    receiver, memory, loop = start(3), staged(), asyncio.get_running_loop()
    receiver.listen()
    gpu.may_pin.set()
    with directory.connect(receiver.address) as raw:
        raw.send(packets.hello(receiver.address.token, 0))
        async with asyncio.timeout(DEADLINE_S):
            assert await loop.sock_recv(raw, 9) == packets.WELCOME
            socket.send_fds(raw, [packets.memory(0, SIZE, packets.PINNED_MEMORY)], [memory.file])
            assert await loop.sock_recv(raw, 9) == b""
    assert not gpu.pinned


def test_readers_cannot_write_and_owners_cannot_shrink() -> None:
    memory = SharedMemory(SIZE)
    with pytest.raises(ValueError, match="read-only"):
        map_to_read(memory.file, SIZE)[0] = 1
    with pytest.raises(ValueError, match="fewer"):
        map_to_read(memory.file, SIZE + 1)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.file, SIZE // 2)
    memory.bytes[5] = 7
    view = map_to_read(memory.file, SIZE)
    memory.close()
    assert view[5] == 7


async def test_sockets_of_processes_that_have_ended_are_removed(directory: SocketDirectory) -> None:
    listener, dead = directory.listen()
    listener.close()
    # Whatever else is there stays: a file, and a socket of another host that sees the directory.
    (directory.path / f"{dead.name[:9]}precious.sock").touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.bind(str(directory.path / "0000000-other.sock"))
    alive, address = directory.listen()
    names = {path.name for path in directory.path.iterdir()}
    assert names == {address.name, f"{dead.name[:9]}precious.sock", "0000000-other.sock"}
    with pytest.raises(PeerLost):
        directory.connect(dead)
    alive.close()
    directory.remove(address)
    assert address.name not in {path.name for path in directory.path.iterdir()}


async def test_memory_that_cannot_be_mapped_refuses_the_sender_before_it_sends(
    start: Callable[[], LocalExchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    sender, receiver, memory = start(), start(), filled(1)
    sender.share(memory)
    monkeypatch.setattr(shared_memory, "map_to_read", refuse)
    with pytest.raises(PeerLost, match=r"cannot map this worker's memory: \[Errno 12\] no memory"):
        await sender.connect(receiver.listen(), memory)
    monkeypatch.undo()
    await sender.connect(receiver.listen(), memory)


async def test_descriptors_of_strangers_are_closed(
    start: Callable[[], LocalExchange], directory: SocketDirectory
) -> None:
    receiver = start()
    receiver.listen()
    file, loop = os.open("/dev/full", os.O_RDONLY), asyncio.get_running_loop()
    for packet in (b"", b"?", packets.hello(receiver.address.token, 1) + b"?"):
        with directory.connect(receiver.address) as raw:
            socket.send_fds(raw, [packet], [file])
            async with asyncio.timeout(DEADLINE_S):
                assert await loop.sock_recv(raw, 9) == b""
    assert times_open("/dev/full") == 1
    os.close(file)


async def test_a_receiver_of_nonsense_is_a_lost_peer(
    start: Callable[[], LocalExchange], directory: SocketDirectory
) -> None:
    listener, address = directory.listen()
    sender, loop = start(), asyncio.get_running_loop()
    connecting = asyncio.create_task(sender.connect(address))
    async with asyncio.timeout(DEADLINE_S):
        accepted, _ = await loop.sock_accept(listener)
        accepted.send(packets.WELCOME)
        peer = await connecting
        offer = sender.offer(peer, filled(1), one_block(1, 0, 100))
        accepted.send(packets.TAKEN + b"odd")
        with pytest.raises(PeerLost, match="what no worker sends"):
            await offer
    assert peer.closed
    accepted.close()
    listener.close()


async def test_a_process_without_descriptors_accepts_senders_when_it_has_some(
    start: Callable[[], LocalExchange], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver, calls = start(), start(), list[int]()
    address = receiver.listen()
    assert receiver._listener is not None
    listener = receiver._listener

    class Exhausted:
        def accept(self) -> tuple[socket.socket, object]:
            calls.append(1)
            if len(calls) < 3:
                raise OSError(errno.EMFILE, "too many open files")
            return listener.accept()

        def fileno(self) -> int:
            return listener.fileno()

        def close(self) -> None:
            listener.close()

    monkeypatch.setattr(exchange_module, "_NO_FILE_S", 0.01)
    receiver._listener = cast(socket.socket, Exhausted())
    await sender.connect(address)
    assert len(calls) == 3


async def test_a_directory_that_was_not_chosen_may_be_unusable(short_path: Path) -> None:
    """TMPDIR may be too long for a socket's name, or belong to root alone."""
    deep = short_path / ("d" * 100)
    transport = open_transport("ucx", local_sockets=SocketDirectory(deep, is_required=False))
    assert isinstance(transport, WithLocal)
    transport.share(SharedMemory(SIZE))
    await transport.listen()
    assert transport.local_address is None
    await transport.close()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # A shorter name of the socket would fit.
        chosen = open_transport("ucx", local_sockets=SocketDirectory(Path(short) / ("d" * (79 - len(short)))))
        with pytest.raises(SetupError, match="No local socket"):
            await chosen.listen()
        await chosen.close()


async def test_transfers_behind_one_that_was_refused_take_ucx_at_once(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[LocalAddress] = []

    async def refuse(address: LocalAddress, memory: object) -> None:
        refused.append(address)
        await asyncio.sleep(0)
        raise PeerLost("It does not answer.")

    monkeypatch.setattr(pair.sender, "connect_locally", refuse)
    data_address = await pair.receiver.listen()
    end = DataEndpoint(host=own_host_identity(), lanes=(), local=pair.receiver.local_address)
    ticket = replace(a_ticket(), data_address=data_address, data_endpoint=end, guarded_addresses=(), bundle_blocks=1)
    shared = SharedMemory(ticket.layout.block_bytes)
    memory = in_place(shared.bytes, ticket.layout, shared)
    sender = Sender(transport=pair.sender, memory=memory, layout=ticket.layout)
    deadline = asyncio.get_running_loop().time() + DEADLINE_S

    async def connected() -> bool:
        async with sender._connected(ticket, deadline) as peer:
            return pair.sender.is_local(peer)

    assert await asyncio.gather(*(connected() for _ in range(5))) == [False] * 5
    assert refused == [end.local]


def test_a_directory_that_anybody_may_write_is_refused(short_path: Path) -> None:
    short_path.chmod(0o777)
    with pytest.raises(SetupError, match="anybody may write"):
        SocketDirectory(short_path)


class Pair:
    """Two workers' transports, both of which have UCX, too."""

    def __init__(self, sender: Path, receiver: Path) -> None:
        self.sender, self.receiver = opened(sender), opened(receiver)


def opened(path: Path) -> WithLocal:
    transport = open_transport("ucx", local_sockets=SocketDirectory(path))
    assert isinstance(transport, WithLocal)
    transport.share(SharedMemory(SIZE))
    return transport


@pytest.fixture
async def pair(short_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(short_path, short_path)
    yield pair
    await pair.sender.close()
    await pair.receiver.close()


async def test_an_inbox_takes_messages_over_ucx_and_offers(pair: Pair) -> None:
    over_ucx = await pair.sender.connect(await pair.receiver.listen())
    assert pair.receiver.local_address is not None
    local = await pair.sender.connect_locally(pair.receiver.local_address)
    assert (pair.sender.is_local(over_ucx), pair.sender.is_local(local)) == (False, True)
    assert pair.sender.lanes(local) == ("local",)
    sent, offered = NotingInbox(pair.receiver, 0, 1000), CopyingInbox(pair.receiver.expect, 1 << 20)
    memory = filled(1)
    for index in range(20):
        send = pair.sender.post_send(over_ucx, index, payload_of(index, 1000))
        await pair.sender.offer(local, memory, one_block((1 << 20) + index, index, 1000))
        await send
        await sent.until_arrived(index + 1)
        await sent.posted[index]
        assert np.array_equal(sent.posted[index].buffer, payload_of(index, 1000))
        assert np.array_equal(offered.copied[(1 << 20) + index], memory.bytes[index : index + 1000])


def test_sockets_in_another_directory_are_out_of_reach(short_path: Path) -> None:
    async def reached(sender: str, receiver: str) -> bool:
        (short_path / sender).mkdir(exist_ok=True)
        (short_path / receiver).mkdir(exist_ok=True)
        pair = Pair(short_path / sender, short_path / receiver)
        await pair.receiver.listen()
        assert pair.receiver.local_address is not None
        try:
            return pair.sender.reaches(pair.receiver.local_address)
        finally:
            await pair.sender.close()
            await pair.receiver.close()

    assert asyncio.run(reached("a", "a"))
    assert not asyncio.run(reached("a", "b"))
