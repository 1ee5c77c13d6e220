"""The way that a transfer's bytes take, and what has gone that way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtransfer.handover.memory import BlockMemory, Bundle
from kvtransfer.transport import LocalTransports, Peer, Transport
from kvtransfer.transport.local.offer import MAX_BLOCKS

#: Bytes offered at once: few at first, so that the receiver starts soon, then so many that an offer costs little.
_FIRST_OFFER_BYTES, _MAX_OFFER_BYTES = 2 << 20, 16 << 20


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
    #: The transport, where blocks are offered to a peer of this host; None: they are sent.
    local: LocalTransports | None = None


def offered_runs(bundles: Sequence[Bundle], bundle_bytes: int) -> Iterator[Sequence[Bundle]]:
    """Cuts bundles, whose messages have so many bytes, into those that are offered together."""
    first, num_bytes = 0, _FIRST_OFFER_BYTES
    while first < len(bundles):
        run = bundles[first : first + max(1, min(num_bytes // bundle_bytes, MAX_BLOCKS))]
        yield run
        first, num_bytes = first + len(run), min(2 * num_bytes, _MAX_OFFER_BYTES)
