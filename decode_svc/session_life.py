"""Where a decode session stands: Queued -> Receiving -> Runnable, or straight to Runnable without a transfer."""

from __future__ import annotations

from dataclasses import dataclass

from kvtransfer.handover.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Queued:
    """The request waits for blocks, or computes its prompt without having been granted any."""

    since: float
    #: As in `Reservation`.
    senders_ask: bool = False


@dataclass(frozen=True, slots=True)
class Receiving:
    """The request holds its blocks. Another worker has the ticket to fill them."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Runnable:
    """Nothing but the batch is left to wait for: the KV was received, or the prompt is computed here."""

    since: float
    is_received: bool
