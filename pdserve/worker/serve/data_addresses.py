"""Calls between workers about data addresses: of one that has a ticket to the one that granted it, and the answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import grpc

from kvtransfer.handover.data_address import (
    DataAddress,
    data_address,
    data_address_from_proto,
    data_address_to_proto,
    new_address_request,
    require_nonce,
)
from kvtransfer.handover.introduction import (
    Introduction,
    answer_to_proto,
    answered,
    connections_from_proto,
    introduction_from_proto,
    introduction_to_proto,
)
from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport import GuardedTransport
from kvtransfer.transport.own_sockets import Connection
from pdserve.base.errors import RequestError
from pdserve.net.rpc import mapped_rpc_errors
from pdserve.peers.seals import Purpose, receiver_name
from pdserve.v1 import decode_pb2, decode_pb2_grpc
from pdserve.worker.serve.worker import Worker


class DataAddressCalls:
    """Implements `kvtransfer.handover.introduction.TicketCalls` over gRPC.

    The other process may have taken over the address of a worker that has ended: it cannot seal an answer then, and
    calls raise PeerRefused.
    """

    def __init__(
        self, worker: Worker, channel_to: Callable[[Ticket], AbstractAsyncContextManager[grpc.aio.Channel]]
    ) -> None:
        """`channel_to`: the channel to the worker that granted a ticket, open until its block ends."""
        self._worker = worker
        self._channel_to = channel_to

    async def introduce(self, ticket: Ticket, introduction: Introduction) -> tuple[Connection, ...]:
        """Introduces this worker. Returns the unknown connections which the other one has opened."""
        seals, request = self._worker.seals, introduction_to_proto(introduction)
        sealed = seals.seal(Purpose.INTRODUCTION, receiver_name(ticket.worker_id, ticket.epoch), request)
        with mapped_rpc_errors(f"decode worker {ticket.worker_id}"):
            async with self._channel_to(ticket) as channel:
                stub = decode_pb2_grpc.DecodeServiceStub(channel)
                answer: decode_pb2.IntroduceResponse = await stub.Introduce(sealed, timeout=ticket.lease_s)
        answer = seals.open(Purpose.INTRODUCED, request.nonce, answer, once=False)
        return connections_from_proto(answer.known)

    async def data_address(self, ticket: Ticket) -> DataAddress:
        """The address that the ticket lacks."""
        seals, request = self._worker.seals, new_address_request()
        sealed = seals.seal(Purpose.ADDRESS_REQUEST, receiver_name(ticket.worker_id, ticket.epoch), request)
        with mapped_rpc_errors(f"decode worker {ticket.worker_id}"):
            async with self._channel_to(ticket) as channel:
                stub = decode_pb2_grpc.DecodeServiceStub(channel)
                answer: decode_pb2.GetDataAddressResponse = await stub.GetDataAddress(sealed, timeout=ticket.lease_s)
        return data_address_from_proto(seals.open(Purpose.ADDRESS, request.nonce, answer, once=False))


async def answer_introduction(worker: Worker, request: decode_pb2.IntroduceRequest) -> decode_pb2.IntroduceResponse:
    """Lets data into the connections of a worker of this cluster. Raises: PeerRefused, RequestError, PeerLost."""
    request = worker.seals.open(Purpose.INTRODUCTION, worker.seal_name, request)
    introduction = introduction_from_proto(request)
    if not isinstance(worker.transport, GuardedTransport):
        raise RequestError(f"Transport {worker.transport.name} takes no introductions.")
    known = answer_to_proto(await answered(introduction, worker.transport.guard))
    return worker.seals.seal(Purpose.INTRODUCED, request.nonce, known, once=False)


async def answer_data_address(
    worker: Worker, request: decode_pb2.GetDataAddressRequest
) -> decode_pb2.GetDataAddressResponse:
    """Opens the data address for a worker of this cluster. Raises: PeerRefused, RequestError, SetupError."""
    request = worker.seals.open(Purpose.ADDRESS_REQUEST, worker.seal_name, request)
    require_nonce(request)
    address = await worker.transport.listen()
    found = data_address_to_proto(data_address(worker.transport, address))
    return worker.seals.seal(Purpose.ADDRESS, request.nonce, found, once=False)
