"""Tickets with a MAC: a prefill worker uses what a decode worker granted to this request, and nothing else."""

from __future__ import annotations

import pytest

from kvtransfer.handover.sealed_ticket import opened_ticket, sealed_ticket
from kvtransfer.handover.ticket import ticket_to_proto
from kvtransfer.transport.ucx_address import pack_address
from pdserve.base.errors import PeerRefused
from pdserve.base.ids import RequestId
from pdserve.peers.seals import Refusal, Seals
from pdserve.peers.secret import parse_secret
from pdserve.v1 import decode_pb2
from tests.support.tickets import a_ticket

REQUEST = RequestId("r1")


@pytest.fixture
def refused() -> list[Refusal]:
    return []


@pytest.fixture
def seals(refused: list[Refusal]) -> Seals:
    return Seals(parse_secret("the-secret-of-this-cluster", where="test"), on_refused=refused.append)


def test_a_granted_ticket_is_opened_and_the_router_can_read_it(seals: Seals) -> None:
    ticket = a_ticket()
    message = decode_pb2.Ticket.FromString(sealed_ticket(ticket, REQUEST, seals).SerializeToString())
    assert (message.attempt, message.lease_s, message.first_block) == (2, 20.0, 3)
    for _ in range(2):  # The ticket itself may come twice: the request around it may not.
        assert opened_ticket(message, REQUEST, seals) == ticket


def test_a_ticket_without_a_grant_is_refused(seals: Seals, refused: list[Refusal]) -> None:
    with pytest.raises(PeerRefused):
        opened_ticket(ticket_to_proto(a_ticket()), REQUEST, seals)
    foreign = Seals(parse_secret("the-secret-of-another-cluster", where="test"))
    with pytest.raises(PeerRefused):
        opened_ticket(sealed_ticket(a_ticket(), REQUEST, foreign), REQUEST, seals)
    assert refused == [Refusal.MISSING, Refusal.FORGED]


def test_an_address_outside_of_the_seal_is_not_used(seals: Seals) -> None:
    """Finding 6: UCX aborts the process for this address."""
    message = sealed_ticket(a_ticket(), REQUEST, seals)
    message.data_address = pack_address(b"\xff" * 64)
    message.grpc_address = "192.0.2.1:1"
    opened = opened_ticket(message, REQUEST, seals)
    assert (opened.data_address, opened.grpc_address) == (b"somewhere", "127.0.0.1:1")


def test_the_ticket_of_another_request_is_refused(seals: Seals, refused: list[Refusal]) -> None:
    with pytest.raises(PeerRefused):
        opened_ticket(sealed_ticket(a_ticket(), RequestId("r2"), seals), REQUEST, seals)
    assert refused == [Refusal.FORGED]


def test_in_an_open_cluster_a_ticket_has_no_seal() -> None:
    ticket = a_ticket()
    message = sealed_ticket(ticket, REQUEST, Seals())
    assert message == ticket_to_proto(ticket)
    assert opened_ticket(message, REQUEST, Seals()) == ticket
