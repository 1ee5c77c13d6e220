"""The small protocol that moves tagged messages between two processes, and the operation objects it hands out.

Everything belongs to the event loop that opened the transport; nothing here is thread-safe.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdserve.base.errors import PdserveError

#: What travels: a contiguous, one-dimensional array of bytes. Receives need it writable. UCX and NCCL take what lies in
#: a GPU's memory, too, which says so by `__cuda_array_interface__`.
Buffer = npt.NDArray[np.uint8]

TAG_LIMIT = 1 << 64


class Operation:
    """One posted receive or send. Await it, or look at `done`; awaiting raises what made it fail.

    Cancelling a task that awaits it does not touch the operation: the buffer stays in use until it is done.
    """

    __slots__ = ("_callbacks", "buffer", "cancelled", "done", "error", "tag")

    def __init__(self, tag: int, buffer: Buffer) -> None:
        if not 0 <= tag < TAG_LIMIT:
            raise ValueError(f"tag {tag} does not fit 64 bits")
        # What is in a GPU's memory is contiguous whenever it is a buffer.
        in_host_memory = not hasattr(buffer, "__cuda_array_interface__")
        if buffer.ndim != 1 or buffer.dtype != np.uint8 or (in_host_memory and not buffer.flags.c_contiguous):
            raise ValueError(f"a buffer is a contiguous vector of bytes, not {buffer.dtype} {buffer.shape}")
        self.tag = tag
        self.buffer = buffer
        #: No longer using the buffer: completed, failed or cancelled.
        self.done = False
        #: Ended by `Transport.cancel` before a message was matched to it; the buffer was not touched.
        self.cancelled = False
        #: Why it failed; None while it runs, after success and after a cancel.
        self.error: PdserveError | None = None
        self._callbacks: list[Callable[[Operation], None]] = []

    def add_done_callback(self, callback: Callable[[Operation], None]) -> None:
        """Calls back in the moment it is done, while its bytes are in the processor's cache; at once if it is already.

        That is inside the transport: a callback is short and does not raise. It may post and disconnect.
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
    def complete(self) -> None:
        """The bytes are there (receive), or the buffer may be reused (send)."""
        if not self.done:
            self._end()

    def fail(self, error: PdserveError) -> None:
        """It will not complete, and nothing touches the buffer any more."""
        if not self.done:
            self.error = error
            self._end()

    def mark_cancelled(self) -> None:
        """It was withdrawn before it was matched."""
        if not self.done:
            self.cancelled = True
            self._end()

    def _end(self) -> None:
        self.done = True
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class Peer(Protocol):
    """The way to one incarnation of another process."""

    @property
    def closed(self) -> bool:
        """No more sends: it was disconnected or found to be lost."""
        ...


class Transport(Protocol):
    """Tagged messages between processes. Receives are matched by tag alone, in any order, whoever sends.

    A message that is sent before its receive is posted waits at the receiver. A tag is used for one message.
    """

    @property
    def name(self) -> str:
        """As in tickets: "ucx", "nccl" or "inproc"."""
        ...

    async def listen(self) -> bytes:
        """This process's data address, of its current incarnation: ask again for every ticket.

        Raises: SetupError when the transport cannot be brought up.
        """
        ...

    async def connect(self, address: bytes) -> Peer:
        """A way to whoever listens at `address`. Cheap; whether the peer lives may show only when sending.

        Raises: PeerLost when it is known to be gone or the address makes no sense.
        """
        ...

    def disconnect(self, peer: Peer) -> None:
        """Gives the peer up: its unfinished sends fail with `PeerLost` soon, and their buffers may then be reused."""
        ...

    def post_receive(self, tag: int, buffer: Buffer) -> Operation:
        """Lets the message `tag`, of exactly the buffer's size, land in `buffer`. Never blocks.

        Raises: ValueError when a receive of that tag is outstanding.
        """
        ...

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        """Starts sending; done when the buffer may be reused. Never blocks.

        A peer that dies may leave it outstanding for ever: the caller keeps a deadline and disconnects. When it fails,
        what the receiver got under this tag is unspecified.
        """
        ...

    async def cancel(self, receives: Iterable[Operation]) -> None:
        """Withdraws receives; returns when none of their buffers can be written any more.

        A message that is already landing is let finish, for a bounded time. Later messages of these tags are dropped.
        """
        ...

    async def close(self) -> None:
        """Fails what is outstanding with `PeerLost` and leaves no thread, socket or descriptor behind."""
        ...
