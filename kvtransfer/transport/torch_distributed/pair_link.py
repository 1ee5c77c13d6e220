"""The link that carries the messages of one connected pair of processes: seams for gloo, NCCL and tests."""

from __future__ import annotations

import socket
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from kvtransfer.transport.base import Buffer

LISTENER_RANK, CONNECTOR_RANK = 0, 1
#: The store looks up the name of each connecting host, which takes 5 s or 10 s where a name server drops queries.
RENDEZVOUS_TIMEOUT = timedelta(seconds=20)
#: Limit for one message, whose end costs the pair. Breaking the pair off is quicker.
TRANSFER_TIMEOUT = timedelta(seconds=5)
#: The error of transfers that `PairLink.break_off` ends.
BROKEN_OFF = "The link to the other process was closed, because that process or an earlier transfer was lost."


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Meeting point of the two processes of a pair: the listener's store, and the pair's number in it."""

    host: str
    port: int
    number: int
    rank: int

    def open_store(self) -> Store:
        """A store that only these two share. Raises: RuntimeError, after at most `RENDEZVOUS_TIMEOUT`."""
        store = TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=RENDEZVOUS_TIMEOUT)
        return PrefixStore(f"pair/{self.number}", store)


def listening_store(host: str) -> TCPStore:
    """A store that listens on this address only; by itself it would on every one. Raises: OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    # The store owns the descriptor.
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class PairLink(Protocol):
    """Carries the messages of one pair, from the connector to the listener, in the order of the calls on both sides.

    No call blocks. The link's threads complete the futures with the buffer, in order, or fail them: the pair is then
    lost, and transfers that have not started fail before those that have. However a future ends, nothing touches its
    buffer any more.
    """

    def form(self, rendezvous: Rendezvous) -> Future[None]:
        """Connects to the other process, before any message. Fails when that process does not come in time."""

    def send(self, payload: Buffer) -> Future[Buffer]:
        """Sends the next message; for the connector."""

    def receive(self, payload: Buffer) -> Future[Buffer]:
        """Receives the next message, of exactly that size; for the listener."""

    def receive_unmatched(self, num_bytes: int, *, keeps: bool) -> Future[Buffer]:
        """Receives the next message into memory of the link. Without `keeps`, later messages overwrite it."""

    def break_off(self) -> Future[None]:
        """Ends transfers under way and starts no more. Called once; only `join` may follow.

        All futures fail soon. The result is done when they have, and no work is left.
        """

    def join(self) -> None:
        """Waits for the threads to end, which takes a short time after `break_off` is done."""


class PairLinks(Protocol):
    """The links of one process, and the memory of their messages."""

    @property
    def gpu(self) -> str:
        """Name of the GPU that holds the buffers, unique over all machines, without blanks; empty: host memory."""

    @property
    def max_early(self) -> int:
        """Number of messages that may wait for their receive in memory of the links."""

    @property
    def max_unmatched_bytes(self) -> int:
        """Bytes that these may have together, and any one message for which no receive of its size waits."""

    @property
    def connect_timeout_s(self) -> float | None:
        """Limit for connecting; None: `PairLink.form` ends by itself."""

    @property
    def close_timeout_s(self) -> float | None:
        """Limit for all links that were broken off to end; None: each ends by itself."""

    def open(self, name: str) -> PairLink:
        """A new link, whose threads have this name."""

    def copy(self, source: Buffer, target: Buffer) -> Future[Buffer]:
        """Copies an unmatched message to its receive. Done with the target, perhaps at once, or fails."""

    def close(self) -> Future[None]:
        """Called after all calls of `copy`. Done when no copy runs and no thread is left for copies."""
