"""A connected pair of processes as the transport sees it, and the messages that arrive over it."""

from __future__ import annotations

import asyncio
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvtransfer.transport.base import Buffer, Operation
from kvtransfer.transport.torch_distributed.pair_link import PairLink
from pdserve.base.errors import PeerLost


@dataclass(eq=False, slots=True)
class Arrival:
    """An announced message, received into its receive's buffer, or elsewhere if that is not posted or does not fit."""

    pair: Pair
    tag: int
    num_bytes: int
    receive: Operation | None = None
    #: An inbox will post its receive, or drop it: until then it is not received, nor is what was announced behind it.
    is_held: bool = False
    #: It was held for so long that it is received into memory of its own.
    is_set_aside: bool = False
    #: The message will not be received.
    dropped: bool = False
    #: The received bytes.
    data: Buffer | None = None
    error: PeerLost | None = None

    @property
    def may_start(self) -> bool:
        """Whether it is known where to receive it."""
        return not self.is_held or self.is_set_aside or self.receive is not None or self.dropped

    @property
    def landed(self) -> bool:
        """Whether the message was received or lost."""
        return self.data is not None or self.error is not None

    def drop(self) -> None:
        """The message will not be received."""
        self.dropped = True


@dataclass(eq=False, slots=True)
class Pair:
    """The connection to or from one other process."""

    control: asyncio.Transport
    link: PairLink
    lost: bool = False
    formed: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    #: Announced messages that the link does not receive yet, in order. Only the first one's inbox knows of it: memory
    #: that one behind it had would wait for the first one's.
    queue: deque[Arrival] = field(default_factory=deque)
    is_advancing: bool = False
    #: Sets the first one aside, and the last one that was.
    patience: asyncio.TimerHandle | None = None
    aside: Arrival | None = None
    #: Messages that the link receives.
    arrivals: set[Arrival] = field(default_factory=set)

    @property
    def num_announced(self) -> int:
        """Messages that were announced and have not landed."""
        return len(self.queue) + len(self.arrivals)

    @property
    def closed(self) -> bool:
        """Whether the pair was disconnected or lost."""
        return self.lost

    def report_formed(self, error: PeerLost | None) -> None:
        """Ends the rendezvous."""
        if error is None:
            self.formed.set_result(None)
        else:
            self.formed.set_exception(error)
            self.formed.exception()  # Marked as retrieved: on the listener's side no caller waits.

    def break_off(self) -> Future[None]:
        """Ends transfers under way; done when they have ended.

        The other process sees the control connection end, and does the same.
        """
        self.lost = True
        if self.patience is not None:
            self.patience.cancel()
        self.control.abort()
        return self.link.break_off()
