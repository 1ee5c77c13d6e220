"""Tickets in a cluster with a secret: no prefill worker connects to an address that no decode worker has granted."""

from __future__ import annotations

from kvtransfer.handover.ticket import Ticket, ticket_from_proto, ticket_to_proto
from pdserve.base.ids import RequestId
from pdserve.peers.seals import Purpose, Seals
from pdserve.v1 import decode_pb2

# A ticket has no receiver yet, and a request is sealed around it: what bounds its reuse is that the decode worker
# accepts one commit for its transfer id, attempt and epoch.


def sealed_ticket(ticket: Ticket, request_id: RequestId, seals: Seals) -> decode_pb2.Ticket:
    """The ticket as it travels: its fields for the router, and a sealed copy for the prefill worker."""
    message = ticket_to_proto(ticket)
    sealed = seals.seal(Purpose.TICKET, request_id.encode(), message, once=False)
    if sealed is not message:
        message.sealed.CopyFrom(sealed.sealed)
    return message


def opened_ticket(message: decode_pb2.Ticket, request_id: RequestId, seals: Seals) -> Ticket:
    """The ticket that was granted to this request.

    Raises: PeerRefused unless a worker of this cluster has granted it; RequestError as `ticket_from_proto`.
    """
    return ticket_from_proto(seals.open(Purpose.TICKET, request_id.encode(), message, once=False))
