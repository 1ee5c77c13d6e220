"""Introductions: a worker names its connections to the worker at their other end, in a message that proves who it is.

Where the library below has no authentication, that lets data in (`kvtransfer/transport/base.py:TransportGuard`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Protocol

from kvtransfer.handover.data_address import DataAddress
from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport import GuardedTransport, Peer, Transport
from kvtransfer.transport.base import TransportGuard
from kvtransfer.transport.own_sockets import Connection, own_connections
from pdserve.base.errors import PdserveError, PeerLost, RequestError
from pdserve.v1 import decode_pb2

#: Connections in one message. UCX opens one per network device.
MAX_CONNECTIONS = 64
_NONCE_BYTES = 16
_MAX_ADDRESS_CHARACTERS = 64
#: Pauses between looks for connections that the other end opened, in seconds. UCX says nothing about them.
_FIRST_PAUSES, _LATER_PAUSE = (0.02, 0.05, 0.1, 0.2, 0.5), 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """A worker's message to another one about the connections between them."""

    #: Opened by this worker.
    own: tuple[Connection, ...] = ()
    #: Opened by somebody to this worker: is it the other one?
    unknown: tuple[Connection, ...] = ()


#: Sends it to the worker that granted the ticket. Returns the unknown connections which that worker has opened.
Introduce = Callable[[Ticket, Introduction], Awaitable[tuple[Connection, ...]]]


class TicketCalls(Protocol):
    """Calls to the worker that granted a ticket. Raises: PeerLost, and what that worker answers."""

    async def introduce(self, ticket: Ticket, introduction: Introduction) -> tuple[Connection, ...]:
        """As `Introduce`."""
        ...

    async def data_address(self, ticket: Ticket) -> DataAddress:
        """The data address that the ticket lacks, which is opened if nobody has needed it so far."""
        ...


class NoCalls:
    """Implements `TicketCalls` where all tickets have a data address, and nothing is guarded."""

    async def introduce(self, ticket: Ticket, introduction: Introduction) -> tuple[Connection, ...]:
        """Nothing is unknown."""
        return ()

    async def data_address(self, ticket: Ticket) -> DataAddress:
        """Raises: PeerLost."""
        raise PeerLost(f"The ticket of {ticket.worker_id} has no data address, and there is nobody to ask.")


class Introductions:
    """The introductions to workers that this one sends to."""

    def __init__(self, transport: Transport, introduce: Introduce) -> None:
        self._transport = transport
        self._introduce = introduce

    async def connect(self, ticket: Ticket) -> Peer:
        """A peer that lets our data in. Raises: PeerLost, and what the other worker answers."""
        peer = await self._transport.connect(ticket.data_address)
        if not isinstance(self._transport, GuardedTransport) or not ticket.guarded_addresses:
            return peer
        guard = self._transport.guard
        try:
            with guard.introducing(ticket.guarded_addresses) as own:
                if own:
                    await self._introduce(ticket, Introduction(own=tuple(own)))
            guard.confirm(own)
        except BaseException:
            self._transport.disconnect(peer)
            raise
        return peer

    async def answer_callbacks(self, ticket: Ticket) -> None:
        """Lets in connections that the worker of this ticket opens to this one, until cancelled.

        UCX answers over the connection that brought a message. It opens another one when it counted the connections
        between two addresses differently at both ends, as after a restart at the same address.
        """
        if not isinstance(self._transport, GuardedTransport) or not self._transport.guard.is_active:
            return
        guard, hosts = self._transport.guard, {_host(address) for address in ticket.guarded_addresses}
        for pause in chain(_FIRST_PAUSES, repeat(_LATER_PAUSE)):
            await asyncio.sleep(pause)
            unknown = [each for each in guard.strangers() if _host(each.source) in hosts]
            # An error ends neither the transfer, which has a deadline, nor this.
            with suppress(PdserveError):
                if unknown:
                    latest = Introduction(unknown=tuple(unknown[-MAX_CONNECTIONS:]))
                    await guard.admit(await self._introduce(ticket, latest))


async def answered(introduction: Introduction, guard: TransportGuard) -> tuple[Connection, ...]:
    """Lets data into the connections that a worker of this cluster has opened. Returns those that are from here."""
    await guard.admit(introduction.own)
    return tuple(own_connections(introduction.unknown))


def introduction_to_proto(introduction: Introduction) -> decode_pb2.IntroduceRequest:
    """The introduction as it travels, with a nonce for the answer."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    own, unknown = _to_proto(introduction.own), _to_proto(introduction.unknown)
    return decode_pb2.IntroduceRequest(own=own, unknown=unknown, nonce=nonce)


def introduction_from_proto(message: decode_pb2.IntroduceRequest) -> Introduction:
    """The introduction. Raises: RequestError, which names a field that no worker would send."""
    if len(message.nonce) != _NONCE_BYTES:
        raise RequestError(f"Malformed introduction: the nonce has {len(message.nonce)} bytes, not {_NONCE_BYTES}.")
    return Introduction(own=connections_from_proto(message.own), unknown=connections_from_proto(message.unknown))


def answer_to_proto(known: Sequence[Connection]) -> decode_pb2.IntroduceResponse:
    """The answer as it travels."""
    return decode_pb2.IntroduceResponse(known=_to_proto(known))


def connections_from_proto(messages: Sequence[decode_pb2.DataConnection]) -> tuple[Connection, ...]:
    """The connections. Raises: RequestError when they are too many or too long."""
    if len(messages) > MAX_CONNECTIONS:
        raise RequestError(f"Malformed introduction: {len(messages)} connections, and {MAX_CONNECTIONS} is the limit.")
    found = tuple(Connection(each.source, each.target) for each in messages)
    if any(len(address) > _MAX_ADDRESS_CHARACTERS for each in found for address in each):
        raise RequestError(f"Malformed introduction: an address has more than {_MAX_ADDRESS_CHARACTERS} characters.")
    return found


def _to_proto(connections: Sequence[Connection]) -> list[decode_pb2.DataConnection]:
    return [decode_pb2.DataConnection(source=each.source, target=each.target) for each in connections]


def _host(address: str) -> str:
    return address.rpartition(":")[0]
