"""torch.distributed point-to-point: one two-rank process group per connected pair, so that peers can come and go.

A plain TCP connection per pair carries the rendezvous and announces each message (tag and size). The pair's link (gloo
for buffers in host memory, NCCL for a GPU's) carries only payloads, in the order announced. So tags have 64 bits, where
gloo has 32 and NCCL none, and only transfers under way wait inside torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch._C._distributed_c10d import TCPStore

from kvtransfer.transport.base import Buffer, Operation, Peer
from kvtransfer.transport.tag_matcher import OpensInboxes, TagMatcher
from kvtransfer.transport.torch_distributed.address import DataAddress
from kvtransfer.transport.torch_distributed.control import ConnectorControl, ListenerControl, announce, greet
from kvtransfer.transport.torch_distributed.ends import closed, finish, finish_copy, wrong_size
from kvtransfer.transport.torch_distributed.pair import Arrival, Pair
from kvtransfer.transport.torch_distributed.pair_link import (
    BROKEN_OFF,
    CONNECTOR_RANK,
    LISTENER_RANK,
    PairLinks,
    Rendezvous,
    listening_store,
)
from kvtransfer.transport.torch_distributed.turns import Turns
from pdserve.base.errors import PeerLost, SetupError
from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Pairs that may form at a time. Each takes a thread, also where a stranger connected and says nothing.
_MAX_FORMING = 64


class TorchDistributedTransport(OpensInboxes[Arrival]):
    """`Transport` over torch.distributed. `host` is the address at which peers reach this process.

    `drain_timeout_s` bounds how long `cancel` waits for an arriving message; then its pair is broken off.
    """

    name = "nccl"

    def __init__(self, links: PairLinks, *, host: str = "127.0.0.1", drain_timeout_s: float = 5.0) -> None:
        self._links = links
        self._host = host
        self._drain_timeout_s = drain_timeout_s
        self._matcher = TagMatcher[Arrival](
            self._drop, max_early=links.max_early, max_early_bytes=links.max_unmatched_bytes
        )
        self._turns = Turns(self._matcher, links.max_unmatched_bytes, self._receive)
        self._pairs: set[Pair] = set()
        #: Pairs that were broken off and have not ended.
        self._ending: dict[Pair, Future[None]] = {}
        self._closed = False
        self._next_pair = 0
        self._server: asyncio.Server | None = None
        self._store: TCPStore | None = None

    async def listen(self) -> bytes:
        """Host, GPU, control port and store port; the ports are opened by the first call."""
        if self._server is None:
            try:
                loop = asyncio.get_running_loop()
                self._server = await loop.create_server(lambda: ListenerControl(self), self._host, 0)
                self._store = listening_store(self._host)
            except OSError as error:
                raise SetupError(f"Cannot listen on {self._host}: {error}.") from error
        assert self._store is not None
        port = self._server.sockets[0].getsockname()[1]
        return DataAddress(self._host, self._links.gpu, port, self._store.port).pack()

    async def connect(self, address: bytes) -> Pair:
        """Forms a pair with the listener.

        Raises: PeerLost, also where NCCL cannot connect the two.
        """
        target = DataAddress.unpack(address)
        target.require_reachable_from(self._links.gpu)
        try:
            control, protocol = await asyncio.get_running_loop().create_connection(
                ConnectorControl, target.host, target.control_port
            )
        except (OSError, ValueError) as error:  # ValueError: no name of a host.
            raise PeerLost(f"Cannot connect to {target.host[:255]!r}:{target.control_port}: {error}.") from error
        if self._closed:
            control.abort()
            raise closed()
        pair = Pair(control, self._links.open("nccl-send"))
        protocol.on_lost = lambda: self.lose(pair)
        self._pairs.add(pair)
        try:
            async with asyncio.timeout(self._links.connect_timeout_s):
                number = await protocol.greeting
                self._form(pair, target.host, target.store_port, number, CONNECTOR_RANK)
                await asyncio.shield(pair.formed)
        except TimeoutError as error:
            self.lose(pair)
            raise PeerLost(f"{target.host} did not answer within {self._links.connect_timeout_s:.0f} s.") from error
        except BaseException:
            self.lose(pair)
            raise
        return pair

    def disconnect(self, peer: Peer) -> None:
        """Breaks the pair off; sends fail as soon as its thread notices."""
        self.lose(_own(peer))

    def post_receive(self, tag: int, buffer: Buffer, digest: Callable[[Buffer], bytes] | None = None) -> Operation:
        """Waits for the announcement of that tag, or takes a message that came early."""
        receive = Operation(tag, buffer, digest)
        early = self._matcher.post(receive)
        if early is not None:
            early.receive = receive
            if early.landed:
                self._deliver(early)
            self._turns.advance(early.pair)
        return receive

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Announces the message and queues its payload."""
        send = Operation(tag, buffer)
        pair = _own(peer)
        if pair.lost:
            send.fail(PeerLost("The peer was disconnected."))
            return send
        announce(pair.control, tag, buffer.nbytes)
        self._then(pair, pair.link.send(buffer), partial(finish, send))
        return send

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws receives without a message, and waits for arriving messages. Slow ones cost their pair."""
        landing = set()
        for receive in receives:
            if self._matcher.withdraw(receive):
                receive.mark_cancelled()
            elif not receive.done:
                landing.add(receive)
        try:
            async with asyncio.timeout(self._drain_timeout_s):
                for receive in landing:
                    await receive.ended()
        except TimeoutError:
            for pair in [p for p in self._pairs if any(a.receive in landing for a in p.arrivals)]:
                log.warning("nccl_pair_broken", reason="an arriving message did not finish")
                self.lose(pair)
            for receive in landing:
                await receive.ended()

    async def close(self) -> None:
        """Breaks every pair off and closes the ports. Threads that torch does not return in time are left behind."""
        self._closed = True  # From now on no message is copied and no process accepted.
        for pair in list(self._pairs):
            self.lose(pair)
        ending = dict(self._ending)
        # Reports of the threads that come meanwhile are handled first.
        over = [asyncio.wrap_future(end) for end in (*ending.values(), self._links.close())]
        await asyncio.wait(over, timeout=self._links.close_timeout_s)
        for pair, end in ending.items():
            if end.done():
                pair.link.join()
            else:
                log.warning("nccl_pair_left", reason="NCCL did not return after an abort")
        receives, _ = self._matcher.clear()
        for receive in receives:
            receive.fail(closed())
        self._matcher.lose(closed())
        server, self._server, self._store = self._server, None, None
        if server is not None:
            server.close()
            await server.wait_closed()

    # Calls of the control connections.
    def accept(self, control: asyncio.Transport) -> Pair | None:
        """Implements `Listener`."""
        if self._closed or sum(not pair.formed.done() for pair in self._pairs) + len(self._ending) >= _MAX_FORMING:
            control.abort()
            return None
        assert self._store is not None, "connections are accepted only while listening"
        self._next_pair += 1
        pair = Pair(control, self._links.open("nccl-receive"))
        self._pairs.add(pair)
        greet(control, self._next_pair)
        self._form(pair, self._host, self._store.port, self._next_pair, LISTENER_RANK)
        return pair

    def announced(self, pair: Pair, tag: int, num_bytes: int) -> None:
        """Implements `Listener`: receives the message when it is its turn, and known where to."""
        self._turns.announced(Arrival(pair, tag, num_bytes))

    def _receive(self, arrival: Arrival) -> None:
        pair, receive, num_bytes = arrival.pair, arrival.receive, arrival.num_bytes
        if receive is not None and receive.buffer.nbytes == num_bytes:
            job = pair.link.receive(receive.buffer)
        elif num_bytes > self._links.max_unmatched_bytes:
            log.warning("nccl_pair_broken", reason="an unmatched message is too large", size_bytes=num_bytes)
            self.lose(pair)
            if receive is not None:
                receive.fail(PeerLost(str(wrong_size(num_bytes, receive))))
            return
        else:
            job = pair.link.receive_unmatched(num_bytes, keeps=receive is None and not arrival.dropped)
        pair.arrivals.add(arrival)
        self._call_back(job, partial(self._landed, pair, arrival))

    def _landed(self, pair: Pair, arrival: Arrival, job: Future[Buffer]) -> None:
        pair.arrivals.discard(arrival)
        arrival.error = self._loss(pair, job)
        if arrival.error is None:
            arrival.data = job.result()
        if arrival.receive is not None:
            self._deliver(arrival)

    def _deliver(self, arrival: Arrival) -> None:
        """Ends the receive of a received message, which is copied first if it is not in its buffer."""
        receive = arrival.receive
        assert receive is not None
        if arrival.error is not None:
            receive.fail(arrival.error)
        elif arrival.num_bytes != receive.buffer.nbytes:
            receive.fail(wrong_size(arrival.num_bytes, receive))
        elif arrival.data is receive.buffer:
            receive.complete()
        elif self._closed:
            receive.fail(closed())
        else:
            assert arrival.data is not None, "a message received without an error has data"
            copied = self._links.copy(arrival.data, receive.buffer)
            if copied.done():
                finish_copy(receive, copied)
            else:
                self._call_back(copied, partial(finish_copy, receive))

    def lose(self, pair: Pair) -> None:
        """Breaks the pair off, once."""
        if pair in self._pairs:
            self._pairs.discard(pair)
            while pair.queue:
                arrival = pair.queue.popleft()
                arrival.error = PeerLost(BROKEN_OFF)
                if arrival.receive is not None:
                    self._deliver(arrival)
            end = self._ending[pair] = pair.break_off()
            self._call_back(end, partial(self._ended, pair))

    def _drop(self, arrival: Arrival) -> None:
        arrival.drop()
        self._turns.advance(arrival.pair)

    def _ended(self, pair: Pair, _: Future[None]) -> None:
        del self._ending[pair]

    # Jobs of the links' threads.
    def _form(self, pair: Pair, host: str, store_port: int, number: int, rank: int) -> None:
        rendezvous = Rendezvous(host=host, port=store_port, number=number, rank=rank)
        self._then(pair, pair.link.form(rendezvous), pair.report_formed)

    def _then(self, pair: Pair, job: Future[Any], report: Callable[[PeerLost | None], None]) -> None:
        """Calls `report` on the event loop when the job is done; a failed job ends the pair."""
        self._call_back(job, lambda job: report(self._loss(pair, job)))

    def _loss(self, pair: Pair, job: Future[Any]) -> PeerLost | None:
        error = job.exception()
        if error is None:
            return None
        self.lose(pair)
        return PeerLost(f"torch.distributed lost the peer: {error}")

    def _call_back(self, job: Future[Any], report: Callable[[Future[Any]], None]) -> None:
        """Calls `report` with the job on the event loop.

        A `report` that held the job itself would form a cycle with it, which would keep the payload alive.
        """
        loop = asyncio.get_running_loop()
        job.add_done_callback(lambda job: loop.call_soon_threadsafe(report, job))


def _own(peer: Peer) -> Pair:
    assert isinstance(peer, Pair), "a peer is used with the transport that connected it"
    return peer
