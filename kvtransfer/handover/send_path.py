"""The way that a transfer's bytes take, and what has gone that way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtransfer.handover.memory import BlockMemory, Bundle, Digests, OfferSource
from kvtransfer.transport import LocalTransports, Peer, Transport
from kvtransfer.transport.local.offer import MAX_BLOCKS


@dataclass(frozen=True, slots=True, kw_only=True)
class SendStats:
    """What one transfer put on the wire. Times are the event loop's, in seconds; None before the first message."""

    #: Blocks that were sent whole.
    sent_blocks: int
    sent_bytes: int
    #: Time in which at least one message was on its way.
    busy_s: float
    first_started_at: float | None
    last_done_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPath:
    """The way of a transfer's bytes: from `memory` over `transport` to `peer`."""

    memory: BlockMemory
    transport: Transport
    peer: Peer
    #: Messages that may be on the wire at a time.
    max_outstanding: int
    #: The transport, and where blocks are offered to a peer of this host; None: they are sent.
    local: tuple[LocalTransports, OfferSource] | None = None


class SentDigests:
    """The digests of a transfer's messages, for its commit."""

    def __init__(self, num_messages: int) -> None:
        self._digests = [b""] * num_messages
        #: Messages whose digests are still computed, perhaps.
        self.waiting: list[tuple[range, Digests]] = []

    def add(self, index: int, digest: bytes) -> None:
        """The digest of a message."""
        self._digests[index] = digest

    def add_all(self, indices: range, digests: Sequence[bytes]) -> None:
        """The digests of several messages."""
        self._digests[indices.start : indices.stop : indices.step] = digests

    @property
    def all(self) -> tuple[bytes, ...]:
        """All digests, in the order of the messages; none is waited for any more."""
        return tuple(self._digests)


def offered_runs(
    bundles: Sequence[Bundle], bundle_bytes: int, run_bytes: tuple[int, int]
) -> Iterator[Sequence[Bundle]]:
    """Cuts bundles, whose messages have so many bytes, into those that are offered together.

    `run_bytes`: as `OfferedMemory.run_bytes`. Each run is twice as large as the one before, up to the largest.
    """
    max_bundles = max(1, MAX_BLOCKS // max(map(len, bundles), default=1))
    first, (num_bytes, max_bytes) = 0, run_bytes
    while first < len(bundles):
        run = bundles[first : first + max(1, min(num_bytes // bundle_bytes, max_bundles))]
        yield run
        first, num_bytes = first + len(run), min(2 * num_bytes, max_bytes)
