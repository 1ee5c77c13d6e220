"""What carries the messages of one connected pair of the `nccl` transport: seams for gloo, NCCL and tests."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from kvtransfer.transport.base import Buffer

LISTENER_RANK, CONNECTOR_RANK = 0, 1
#: The store looks up the name of whoever connects, which takes 5 s or 10 s where name service loses questions.
RENDEZVOUS_TIMEOUT = timedelta(seconds=20)
#: For one message. Running into it costs the pair; breaking off is the quicker way.
TRANSFER_TIMEOUT = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the two processes of a pair meet: the listener's store, and the pair's number there."""

    host: str
    port: int
    number: int
    rank: int

    def open_store(self) -> Store:
        """What the two write there only they see. Raises `RuntimeError`, after at most `RENDEZVOUS_TIMEOUT`."""
        store = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT)
        return PrefixStore(f"pair/{self.number}", store)


class PairLink(Protocol):
    """The messages of one pair, from the connector to the listener, in the order of the calls at both.

    No call blocks. Futures are done by threads of the wire, in order, with the buffer, or fail: then the pair is lost,
    and what has not begun fails before what has. However they end, nothing touches the buffer any more.
    """

    def form(self, rendezvous: Rendezvous) -> Future[None]:
        """Meets the other process: comes before all messages. Fails when it does not come in time."""

    def send(self, payload: Buffer) -> Future[Buffer]:
        """The connector's side."""

    def receive(self, payload: Buffer) -> Future[Buffer]:
        """The listener's side: the next message, of exactly that size."""

    def receive_unmatched(self, num_bytes: int, *, keeps: bool) -> Future[Buffer]:
        """The next message, in memory of the wire's. Without `keeps` others overwrite it: nobody looks at it."""

    def break_off(self) -> Future[None]:
        """Ends what is under way and starts nothing more: comes once, as the last call but `join`.

        All futures fail soon; done when they have, and nothing is left to do.
        """

    def join(self) -> None:
        """When `break_off` is done: blocks for the moment in which the threads end."""


class PairLinks(Protocol):
    """PairLinks of one process, and its memory."""

    @property
    def gpu(self) -> str:
        """Names the GPU in whose memory buffers are, over all machines, without blanks; empty: in host memory."""

    @property
    def max_early(self) -> int:
        """Messages that may wait for their receive in memory of the links."""

    @property
    def max_unmatched_bytes(self) -> int:
        """That these may have together, and any one message for which no receive of its size waits."""

    @property
    def connect_timeout_s(self) -> float | None:
        """To connect; None: `PairLink.form` ends by itself."""

    @property
    def close_timeout_s(self) -> float | None:
        """For all links to end that were broken off; None: each ends by itself."""

    def open(self, name: str) -> PairLink:
        """A new one; `name`: of its threads."""

    def copy(self, source: Buffer, target: Buffer) -> Future[Buffer]:
        """What came apart. Done with the target when it is there, which may be at once; or fails."""

    def close(self) -> Future[None]:
        """Comes after all calls of `copy`. Done when nothing is being copied, and no thread is left for it."""
