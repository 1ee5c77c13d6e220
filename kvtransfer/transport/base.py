"""The small protocol that moves tagged messages between two processes, and its operation objects.

Everything belongs to the event loop that opened the transport; nothing here is thread-safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtransfer.transport.own_sockets import Connection
from pdserve.base.errors import PdserveError

if TYPE_CHECKING:
    from kvtransfer.transport.offers import IncomingOffer

#: The bytes of a message: a contiguous, one-dimensional array, writable for receives. UCX and NCCL also take memory of
#: a GPU, which has a `__cuda_array_interface__`.
Buffer = npt.NDArray[np.uint8]

TAG_LIMIT = 1 << 64
#: Low bits of a tag, which number the messages of one `Inbox`. The bits above are random.
TAG_INDEX_BITS = 20


def tag_base_of(tag: int) -> int:
    """The base of the inbox that a tag belongs to."""
    return tag >> TAG_INDEX_BITS << TAG_INDEX_BITS


class Operation:
    """One posted receive or send. Await it or look at `done`; awaiting it raises its error.

    Cancelling a task that awaits it does not affect the operation: the buffer stays in use until it is done.
    """

    __slots__ = ("_callbacks", "_digest_of", "buffer", "cancelled", "digest", "done", "error", "tag")

    def __init__(self, tag: int, buffer: Buffer, digest: Callable[[Buffer], bytes] | None = None) -> None:
        """`digest`: of a receive, computes the digest of what has arrived, on any thread."""
        if not 0 <= tag < TAG_LIMIT:
            raise ValueError(f"A tag has 64 bits, not {tag}.")
        # Buffers in a GPU's memory are always contiguous.
        in_host_memory = not hasattr(buffer, "__cuda_array_interface__")
        if buffer.ndim != 1 or buffer.dtype != np.uint8 or (in_host_memory and not buffer.flags.c_contiguous):
            raise ValueError(f"A buffer is a contiguous vector of bytes, not {buffer.dtype} {buffer.shape}.")
        self.tag = tag
        self.buffer = buffer
        #: The buffer is no longer in use: the operation completed, failed or was cancelled.
        self.done = False
        #: `Transport.cancel` ended it before a message was matched to it; the buffer was not touched.
        self.cancelled = False
        #: Reason of a failure; None while it runs, after success and after a cancel.
        self.error: PdserveError | None = None
        #: Digest of what a receive has brought; None: it is not complete, or nobody wants one.
        self.digest: bytes | None = None
        self._digest_of = digest
        self._callbacks: list[Callable[[Operation], None]] = []

    def add_done_callback(self, callback: Callable[[Operation], None]) -> None:
        """Calls `callback` as soon as the operation is done, while its bytes are in the processor's cache.

        It is called inside the transport: it must be short and must not raise. It may post and disconnect.
        """
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def __await__(self) -> Generator[object, None, None]:
        if not self.done:
            ended = asyncio.get_running_loop().create_future()
            self.add_done_callback(lambda _: None if ended.done() else ended.set_result(None))
            yield from ended
        if self.cancelled:
            raise asyncio.CancelledError
        if self.error is not None:
            raise self.error

    # For transports only.
    async def ended(self) -> None:
        """Returns when it is done, however it has ended."""
        done = asyncio.Event()
        self.add_done_callback(lambda _: done.set())
        await done.wait()

    def complete(self) -> None:
        """Ends it: the bytes have arrived (receive), or the buffer may be reused (send)."""
        if not self.done:
            if self._digest_of is not None:
                self.digest = self._digest_of(self.buffer)
            self._end()

    def fail(self, error: PdserveError) -> None:
        """Ends it: it will not complete, and nothing touches the buffer any more."""
        if not self.done:
            self.error = error
            self._end()

    def mark_cancelled(self) -> None:
        """Ends it: it was withdrawn before it was matched."""
        if not self.done:
            self.cancelled = True
            self._end()

    def _end(self) -> None:
        self.done = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class Inbox(Protocol):
    """Takes the messages of a range of tags: memory for a message is needed when it is there, not before."""

    def arrived(self, tag: int) -> bool:
        """A message waits for its receive, which may be posted within the call or later. False: it is not wanted.

        It is called inside the transport: it must be short and must not raise. It may post and disconnect.
        """
        ...

    def offered(self, blocks: IncomingOffer) -> bool:
        """A process of this host offers messages, which are copied from its memory. Otherwise as `arrived`."""
        ...

    def lost(self, error: PdserveError) -> None:
        """Messages without a receive do not arrive any more. Otherwise as `arrived`."""
        ...


class Peer(Protocol):
    """A connection to one incarnation of another process."""

    @property
    def closed(self) -> bool:
        """Whether sends are impossible, because it was disconnected or found to be lost."""
        ...


class Transport(Protocol):
    """Tagged messages between processes. Receives are matched by tag alone, in any order, from any sender.

    A message that is sent before its receive is posted waits at the receiver: for an `Inbox` as long as that is open,
    and the few others, which are strays, until there are too many. A tag is used for one message.
    """

    @property
    def name(self) -> str:
        """Name in tickets: "ucx", "nccl" or "inproc"."""
        ...

    async def listen(self) -> bytes:
        """The data address of this process's current incarnation; it may change between tickets.

        Raises: SetupError when the transport cannot be brought up.
        """
        ...

    async def connect(self, address: bytes) -> Peer:
        """Connects to the process that listens at `address`. Cheap: a dead peer may show only when sending.

        Raises: PeerLost when it is known to be gone or the address is malformed.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Disconnects: unfinished sends soon fail with `PeerLost`, and their buffers may then be reused."""
        ...

    def expect(self, tag_base: int, inbox: Inbox) -> None:
        """Opens an inbox for the 2^20 tags from `tag_base`, a multiple of 2^20."""
        ...

    def dismiss(self, tag_base: int) -> None:
        """Closes an inbox. Its waiting and later messages are dropped; posted receives are not affected."""
        ...

    def post_receive(self, tag: int, buffer: Buffer, digest: Callable[[Buffer], bytes] | None = None) -> Operation:
        """Receives message `tag`, which has exactly the buffer's size, into `buffer`. Never blocks.

        The operation then has the `digest` of what has arrived.

        Raises: ValueError when a receive of that tag is outstanding.
        """
        ...

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Starts sending; done when the buffer may be reused. Never blocks.

        A dead peer may leave it outstanding forever: the caller must disconnect at a deadline of its own. When it
        fails, the bytes that the receiver got under this tag are unspecified.
        """
        ...

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws receives. Returns when none of their buffers can be written any more.

        A message that is already arriving may finish, for a bounded time. Later messages of these tags are dropped.
        """
        ...

    async def close(self) -> None:
        """Fails outstanding operations with `PeerLost` and leaves no thread, socket or descriptor behind."""
        ...


@runtime_checkable
class LaneReporter(Protocol):
    """A transport whose library reports what it uses: UCX. Others leave it unknown."""

    def offered_lanes(self) -> tuple[str, ...]:
        """What the library can use here, by its own names (tcp, cma, ...). To be called after `listen`."""
        ...

    def lanes(self, peer: Peer) -> tuple[str, ...]:
        """What the connection to the peer uses, by the library's names; empty when it is unknown."""
        ...

    def protocol(self, peer: Peer, *, device_memory: bool) -> str:
        """How large messages reach the peer, in the library's words; empty while it is unknown.

        `device_memory`: those in the memory of a GPU.
        """
        ...


class TransportGuard(Protocol):
    """What lets data into a process from connections that a peer has named as its own, and from no others."""

    @property
    def is_active(self) -> bool:
        """Whether strangers are kept out. Otherwise everybody is let in."""
        ...

    @property
    def addresses(self) -> frozenset[str]:
        """Addresses at which the library accepts connections. They may change with the data address."""
        ...

    def introducing(self, targets: Collection[str]) -> AbstractContextManager[list[Connection]]:
        """The connections that were just opened to these addresses, to be named to the process that listens there.

        Use it at once after `connect`. Within the block the library sends nothing, for a bounded time.
        """
        ...

    def confirm(self, connections: Collection[Connection]) -> None:
        """The process at the other end knows these connections: data is let in from there."""
        ...

    async def admit(self, connections: Collection[Connection]) -> None:
        """A peer has named these connections to this process as its own: data is let in.

        Raises: PeerLost when one of them does not arrive.
        """
        ...

    def strangers(self) -> list[Connection]:
        """Connections to this process that no peer has named."""
        ...


@runtime_checkable
class GuardedTransport(Protocol):
    """A transport whose library has no authentication, so that there is a guard before it: UCX."""

    @property
    def guard(self) -> TransportGuard:
        """The guard of this process."""
        ...
