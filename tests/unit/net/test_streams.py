"""Messages over real sockets: order, back-pressure, errors, and both ways to end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from pdserve.base.errors import NoFreeBlocks, PdserveError
from pdserve.base.wire import error_from_wire, error_to_wire
from pdserve.net import newcomers, stream_server
from pdserve.net.admin import bound_socket
from pdserve.net.newcomers import Newcomers
from pdserve.net.rpc import MAX_MESSAGE_BYTES
from pdserve.net.stream_server import serve_streams
from pdserve.net.streams import MessageStream, PeerLeft, open_stream
from pdserve.v1 import decode_pb2 as pb
from router_svc.request.stream import WRITE_TIMEOUT_S
from tests.support.callbacks import LIMIT_S, longest_callback

WAIT_S = 10.0
Server = MessageStream[pb.DecodeRequest]
Client = MessageStream[pb.DecodeResponse]


def command(attempt: int) -> pb.DecodeRequest:
    return pb.DecodeRequest(renew_ticket=pb.RenewTicket(attempt=attempt))


def event(number: int, padding: int = 0) -> pb.DecodeResponse:
    return pb.DecodeResponse(ticket=pb.TicketGranted(ticket=pb.Ticket(key=bytes(padding)), cached_tokens=number))


@asynccontextmanager
async def serving(
    handle: Callable[[Server], Awaitable[None]], *, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> AsyncIterator[str]:
    def failure(error: PdserveError) -> pb.DecodeResponse:
        return pb.DecodeResponse(failed=error_to_wire(error))

    listener = bound_socket("127.0.0.1", 0, flag="--stream-port")
    async with (
        asyncio.timeout(WAIT_S),
        serve_streams(
            listener, pb.DecodeRequest.FromString, handle, failure, max_message_bytes=max_message_bytes
        ) as address,
    ):
        yield address


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    stream = await open_stream(address, pb.DecodeResponse.FromString)
    try:
        yield stream
    finally:
        stream.close()


async def echo(stream: Server) -> None:
    while (request := await stream.read()) is not None:
        await stream.write(event(request.renew_ticket.attempt))


async def test_messages_arrive_as_they_were_sent_and_in_order() -> None:
    async with serving(echo) as address, connected(address) as client:
        for number in range(200):
            await client.write(command(number))
        for number in range(200):
            assert await client.read() == event(number)


async def test_neither_end_waits_for_an_acknowledgement_before_it_sends() -> None:
    """asyncio sees to that only on the connecting end: a token would wait for up to 40 ms for the one before."""
    ends: list[Server | Client] = []

    async def keep(stream: Server) -> None:
        ends.append(stream)
        await echo(stream)

    async with serving(keep) as address, connected(address) as client:
        await client.write(command(1))
        await client.read()
        for end in (client, *ends):
            assert end._transport is not None
            connection = end._transport.get_extra_info("socket")
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert len(ends) == 1


async def test_messages_may_arrive_in_arbitrary_chunks() -> None:
    async with serving(echo) as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = b"".join(struct.pack(">I", len(c)) + c for c in (command(n).SerializeToString() for n in (1, 2, 3)))
        for chunk in (data[:3], data[3:4], data[4:9], data[9:]):
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0)
        for number in (1, 2, 3):
            (length,) = struct.unpack(">I", await reader.readexactly(4))
            assert pb.DecodeResponse.FromString(await reader.readexactly(length)) == event(number)
        writer.close()


async def test_a_sender_waits_for_a_peer_that_does_not_read_and_nothing_is_lost() -> None:
    total, waiting = 300, asyncio.Event()

    async def pour(stream: Server) -> None:
        for number in range(total):
            writing = asyncio.ensure_future(stream.write(event(number, padding=100_000)))
            await asyncio.sleep(0)
            if not writing.done():
                waiting.set()
            await writing
        await stream.read()

    async with serving(pour) as address, connected(address) as client:
        await waiting.wait()
        for number in range(total):
            message = await client.read()
            assert message is not None
            assert message.ticket.cached_tokens == number


async def test_a_few_unread_large_messages_hold_back_their_sender() -> None:
    total, size = 40, 1 << 19
    gate, streams = asyncio.Event(), list[Server]()

    async def read_late(stream: Server) -> None:
        streams.append(stream)
        await gate.wait()
        for number in range(total):
            request = await stream.read()
            assert request is not None
            assert request.prefill_locally.attempt == number
        await stream.write(event(total))

    def large(number: int) -> pb.DecodeRequest:
        return pb.DecodeRequest(prefill_locally=pb.PrefillLocally(attempt=number, forced_first_tokens=[1] * size))

    async with serving(read_late) as address, connected(address) as client:

        async def send() -> None:
            for number in range(total):
                await client.write(large(number))

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            while not (streams and not streams[0]._transport.is_reading()):  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert len(streams[0]._inbox) in (2, 3)
            gate.set()
            assert await client.read() == event(total)


async def test_the_other_side_notices_a_close() -> None:
    left = asyncio.Event()

    async def wait(stream: Server) -> None:
        assert await stream.read() is None
        left.set()
        raise PeerLeft

    async with serving(wait) as address:
        async with connected(address):
            pass
        await left.wait()


async def test_messages_sent_before_a_close_are_read_before_the_end() -> None:
    async def leave(stream: Server) -> None:
        await stream.write(event(1))
        await stream.write(event(2))

    async with serving(leave) as address, connected(address) as client:
        assert await client.read() == event(1)
        assert await client.read() == event(2)
        assert await client.read() is None
        await client.write(command(1))


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (NoFreeBlocks("full"), NoFreeBlocks("full")),
        (RuntimeError("secret"), PdserveError("The call failed unexpectedly. The worker's log says why.")),
    ],
)
async def test_a_handlers_error_is_the_last_message(error: Exception, reported: PdserveError) -> None:
    async def fail(stream: Server) -> None:
        raise error

    async with serving(fail) as address, connected(address) as client:
        last = await client.read()
        assert last is not None
        received = error_from_wire(last.failed)
        assert (type(received), str(received)) == (type(reported), str(reported))


async def test_a_failure_reaches_a_peer_that_keeps_sending() -> None:
    async def fail(stream: Server) -> None:
        raise NoFreeBlocks("full")

    async with serving(fail) as address, connected(address) as client:
        for number in range(100):
            await client.write(command(number))
            await asyncio.sleep(0)
        last = await client.read()
        assert last is not None
        assert last.failed.name == "NoFreeBlocks"


async def test_a_keep_alive_is_sent_only_where_nothing_else_was_since_the_last() -> None:
    async def handle(stream: Server) -> None:
        stream.keep_alive(event(0))
        await stream.write(event(1))
        stream.keep_alive(event(2))
        stream.keep_alive(event(3))
        await stream.read()

    async with serving(handle) as address, connected(address) as client:
        assert [await client.read() for _ in range(3)] == [event(0), event(1), event(3)]


@pytest.mark.virtual_time
async def test_messages_that_came_while_this_process_was_stopped_are_no_silence() -> None:
    resumed = asyncio.Event()

    async def handle(stream: Server) -> None:
        await resumed.wait()
        await stream.write(event(1))
        await stream.read()

    async with serving(handle) as address, connected(address) as client:
        reading = asyncio.create_task(client.read(3600))
        await asyncio.sleep(0)
        # The limit has passed, and its timer runs before the loop reads what is in the socket.
        client._reader_due = 0.0
        client._check_reader()
        resumed.set()
        assert await reading == event(1)


@pytest.mark.virtual_time
async def test_a_silence_limit_applies_to_one_read_only() -> None:
    async with serving(echo) as address, connected(address) as client:
        await client.write(command(1))
        assert await client.read(0.05) == event(1)
        with pytest.raises(TimeoutError):
            await client.read(0.05)
        reading = asyncio.create_task(client.read())
        _, pending = await asyncio.wait([reading], timeout=0.15)
        assert pending
        await client.write(command(2))
        assert await reading == event(2)


async def test_a_peer_that_speaks_another_protocol_is_cut_off() -> None:
    async with serving(echo) as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(1)
        writer.close()


async def test_leaving_the_server_cancels_its_handlers() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(stream: Server) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with serving(hang) as address:
        client = await open_stream(address, pb.DecodeResponse.FromString)
        await started.wait()
    assert cancelled.is_set()
    assert await client.read() is None
    client.close()


@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("end", ["left", "fails"])
async def test_a_connection_that_arrives_as_the_service_ends_is_closed(end: str, turns: int) -> None:
    loop = asyncio.get_running_loop()
    failed: list[object] = []
    loop.set_exception_handler(lambda loop, context: failed.append(context))
    client = socket.socket()
    with contextlib.suppress(PeerLeft):
        async with serving(echo) as address:
            host, port = address.split(":")
            client.connect((host, int(port)))
            # By now the connection is waiting, accepted, open or served.
            for _ in range(turns):
                await asyncio.sleep(0)
            if end == "fails":
                raise PeerLeft
    client.setblocking(False)
    with client, contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(WAIT_S):
            assert await loop.sock_recv(client, 1) == b""
    assert failed == []


async def test_a_refused_connection_is_an_os_error() -> None:
    with pytest.raises(OSError):
        await open_stream("127.0.0.1:9", pb.DecodeResponse.FromString)


async def test_an_invalid_message_closes_that_connection_and_no_other() -> None:
    async with serving(echo) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(struct.pack(">I", 4) + bytes([255] * 4))  # Not a protobuf message.
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        async with connected(address) as client:
            await client.write(command(3))
            answer = await client.read()
            assert answer is not None
            assert answer.ticket.cached_tokens == 3


@pytest.mark.skipif(sys.platform != "linux", reason="needs TCP_USER_TIMEOUT")
async def test_a_reader_may_stall_longer_than_a_router_waits_for_its_client() -> None:
    served: list[int] = []

    async def look(stream: Server) -> None:
        assert stream._transport is not None
        connection = stream._transport.get_extra_info("socket")
        served.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))

    async with serving(look) as address, connected(address) as client:
        assert await client.read() is None
    assert served[0] > 1000 * WRITE_TIMEOUT_S


async def test_a_message_beyond_the_servers_limit_closes_the_connection_before_it_is_here() -> None:
    """The announced length decides: the first message of a stranger took up to 64 MiB of memory."""
    async with serving(echo, max_message_bytes=64) as address:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(struct.pack(">I", 65))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        async with connected(address) as client:
            await client.write(command(3))
            assert await client.read() == event(3)


async def test_strangers_that_say_nothing_keep_no_one_out_who_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Newcomers.__init__.__kwdefaults__, "max_connections", 4)

    async with serving(trusting) as address, contextlib.AsyncExitStack() as stack:
        friend = await stack.enter_async_context(connected(address))
        await friend.write(command(1))
        assert await friend.read() == event(1)
        silent = [await stack.enter_async_context(connected(address)) for _ in range(6)]
        assert [await each.read() for each in silent[:2]] == [None, None]
        last = await stack.enter_async_context(connected(address))
        for attempt, client in enumerate((friend, last, silent[-1])):
            await client.write(command(attempt))
            assert await client.read() == event(attempt)


async def trusting(stream: Server) -> None:
    first = await stream.read()
    stream.trust()
    if first is not None:
        await stream.write(event(first.renew_ticket.attempt))
        await echo(stream)


async def test_prompts_of_the_largest_size_are_all_served_however_many_come_at_once() -> None:
    """The oldest connections were reset: all first messages shared 16 MiB, and each byte counted twice."""
    size, count = 380_000, 64
    start = pb.DecodeRequest(start=pb.DecodeStart(cache_salt=bytes(size - 16)))

    async def ask(address: str) -> pb.DecodeResponse | None:
        async with connected(address) as client:
            await client.write(start)
            return await client.read()

    async with serving(trusting, max_message_bytes=size) as address:
        assert await asyncio.gather(*(ask(address) for _ in range(count))) == [event(0)] * count


async def test_prompts_beyond_the_turns_of_newcomers_wait_and_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_server, "_max_turns", lambda size: 2)
    size, count = 100_000, 24
    start = pb.DecodeRequest(start=pb.DecodeStart(cache_salt=bytes(size)))
    reading, longest = 0, 0

    async def counting(stream: Server) -> None:
        nonlocal reading, longest
        reading += 1
        longest = max(longest, reading)
        assert await stream.read() is not None
        reading -= 1
        stream.trust()
        await stream.write(event(1))

    async def ask(address: str) -> pb.DecodeResponse | None:
        async with connected(address) as client:
            await client.write(start)
            return await client.read()

    async with serving(counting) as address:
        assert await asyncio.gather(*(ask(address) for _ in range(count))) == [event(1)] * count
    assert longest == 2


async def test_strangers_that_leave_messages_unfinished_hold_little_memory_and_no_prompt_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails if newcomers without a turn are read, or if a turn never ends."""
    monkeypatch.setattr(stream_server, "_max_turns", lambda size: 3)
    monkeypatch.setattr(newcomers, "QUIET_S", 0.05)
    monkeypatch.setattr(stream_server, "SWEEP_S", 0.02)
    size = 200_000
    every: list[Server] = []

    class Seen(MessageStream[pb.DecodeRequest]):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            every.append(self)
            super().connection_made(transport)

    monkeypatch.setattr(stream_server, "MessageStream", Seen)
    async with serving(trusting, max_message_bytes=size) as address, contextlib.AsyncExitStack() as stack:
        host, _, port = address.rpartition(":")
        for _ in range(30):
            _, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(struct.pack(">I", size) + bytes(size - 1))
        held: list[int] = []
        for attempt in range(4):
            client = await stack.enter_async_context(connected(address))
            await client.write(pb.DecodeRequest(start=pb.DecodeStart(cache_salt=bytes(size - 16))))
            assert await client.read() == event(0), attempt
            held.append(sum(len(each._received) for each in every))
        assert len(every) == 34
        assert max(held) <= 3 * (size + 4), held


async def test_a_server_that_stops_closes_connections_that_wait_for_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_server, "_max_turns", lambda size: 1)
    async with contextlib.AsyncExitStack() as stack:
        async with serving(trusting) as address:
            clients = [await stack.enter_async_context(connected(address)) for _ in range(300)]
            await clients[-1].write(command(1))
            await asyncio.sleep(0)
        assert [await client.read() for client in clients[:-1]] == [None] * 299


async def test_a_flood_of_tiny_messages_holds_no_event_loop() -> None:
    """65,000 empty messages fit into one read of a socket."""
    count = 60_000
    ended = asyncio.Event()

    async def take_all(stream: Server) -> None:
        for _ in range(count):
            assert await stream.read() is not None
        ended.set()

    async with serving(take_all) as address:
        host, port = address.split(":")

        async def flood() -> None:
            ended.clear()
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(bytes(4) * count)
            await ended.wait()
            writer.close()

        longest = await longest_callback(flood)
    assert longest.seconds < LIMIT_S, longest.callback
