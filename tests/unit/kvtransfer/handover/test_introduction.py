"""Introductions: which connections are named to whom, and when data is let in."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from kvtransfer.handover.introduction import (
    MAX_CONNECTIONS,
    Introduction,
    Introductions,
    introduction_from_proto,
    introduction_to_proto,
)
from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport import Peer
from kvtransfer.transport.inproc import InprocTransport
from kvtransfer.transport.own_sockets import Connection
from pdserve.base.errors import PeerLost, PeerRefused, RequestError
from pdserve.v1 import decode_pb2
from tests.support.handover import worker_pair

OURS = Connection("10.0.0.1:40000", "10.0.0.2:19600")
THEIRS = Connection("10.0.0.2:40001", "10.0.0.1:19601")
STRANGERS = Connection("10.0.0.2:40002", "10.0.0.1:19601")
OF_ANOTHER_HOST = Connection("10.0.0.3:40003", "10.0.0.1:19601")


class Guarded(InprocTransport):
    """A transport with a guard, of which everything is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = self
        self.is_active = True
        self.addresses = frozenset({"10.0.0.2:19600"})
        self.events: list[object] = []
        self.unknown = [THEIRS, STRANGERS, OF_ANOTHER_HOST]

    @contextmanager
    def introducing(self, targets: Collection[str]) -> Iterator[list[Connection]]:
        self.events.append(("introducing", *targets))
        yield [OURS]
        self.events.append("polled again")

    def confirm(self, connections: Collection[Connection]) -> None:
        self.events.append(("confirmed", *connections))

    async def admit(self, connections: Collection[Connection]) -> None:
        self.unknown = [each for each in self.unknown if each not in connections]
        self.events.append(("admitted", *connections))

    def strangers(self) -> list[Connection]:
        return self.unknown

    def disconnect(self, peer: Peer) -> None:
        self.events.append("disconnected")
        super().disconnect(peer)


async def _ticket(receiving: InprocTransport, *guarded: str) -> Ticket:
    async with worker_pair() as pair:
        ticket = await pair.grant([0])
    return replace(ticket, data_address=await receiving.listen(), guarded_addresses=guarded)


async def test_data_is_let_in_after_the_other_worker_knows_the_connection() -> None:
    transport = Guarded()

    async def introduce(ticket: Ticket, introduction: Introduction) -> tuple[Connection, ...]:
        transport.events.append(introduction)
        return ()

    await Introductions(transport, introduce).connect(await _ticket(transport, "10.0.0.2:19600"))
    assert transport.events == [
        ("introducing", "10.0.0.2:19600"),
        Introduction(own=(OURS,)),
        "polled again",
        ("confirmed", OURS),
    ]


async def test_a_worker_that_is_not_of_this_cluster_gets_no_connection() -> None:
    transport = Guarded()

    async def refused(ticket: Ticket, introduction: Introduction) -> tuple[Connection, ...]:
        raise PeerRefused("The answer is refused.")

    with pytest.raises(PeerRefused):
        await Introductions(transport, refused).connect(await _ticket(transport, "10.0.0.2:19600"))
    assert transport.events == [("introducing", "10.0.0.2:19600"), "disconnected"]


async def test_without_a_guard_at_the_other_end_nothing_is_named() -> None:
    """Also a worker of an older version, which has no such method."""
    transport = Guarded()

    async def introduce(ticket: Ticket, introduction: Introduction) -> tuple[Connection, ...]:
        raise AssertionError("no worker was to be asked")

    await Introductions(transport, introduce).connect(await _ticket(transport))
    assert transport.events == []


@pytest.mark.virtual_time
async def test_connections_of_the_other_worker_are_let_in_and_those_of_strangers_are_not() -> None:
    """One failed call ends nothing. Fails if unknown connections are let in without being asked about."""
    transport, requested = Guarded(), list[tuple[Connection, ...]]()

    async def introduce(ticket: Ticket, introduction: Introduction) -> tuple[Connection, ...]:
        requested.append(introduction.unknown)
        if len(requested) == 1:
            raise PeerLost("The worker does not answer.")
        return (THEIRS,) if THEIRS in introduction.unknown else ()

    ticket = await _ticket(transport, "10.0.0.2:19600")
    answering = asyncio.create_task(Introductions(transport, introduce).answer_callbacks(ticket))
    await asyncio.sleep(2.5)
    answering.cancel()
    assert requested[:3] == [(THEIRS, STRANGERS), (THEIRS, STRANGERS), (STRANGERS,)]
    assert set(requested[2:]) == {(STRANGERS,)}
    assert {event for event in transport.events if event != ("admitted",)} == {("admitted", THEIRS)}


def test_an_introduction_survives_the_wire() -> None:
    introduction = Introduction(own=(OURS,), unknown=(THEIRS, STRANGERS))
    assert introduction_from_proto(introduction_to_proto(introduction)) == introduction


def test_an_introduction_of_impossible_size_is_refused() -> None:
    connection = decode_pb2.DataConnection(source="10.0.0.1:1", target="10.0.0.2:2")
    many = decode_pb2.IntroduceRequest(nonce=bytes(16), own=[connection] * (MAX_CONNECTIONS + 1))
    long = decode_pb2.IntroduceRequest(nonce=bytes(16), unknown=[decode_pb2.DataConnection(source="1" * 65)])
    for message, fault in (
        (many, "65 connections, and 64 is the limit"),
        (long, "more than 64 characters"),
        (decode_pb2.IntroduceRequest(), "the nonce has 0 bytes, not 16"),
    ):
        with pytest.raises(RequestError, match=fault):
            introduction_from_proto(message)
