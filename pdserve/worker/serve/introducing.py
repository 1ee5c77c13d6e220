"""Introductions between workers over gRPC, which decide who may send to a worker's data address."""

from __future__ import annotations

import grpc

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


async def introduce(
    worker: Worker, channel: grpc.aio.Channel, ticket: Ticket, introduction: Introduction
) -> tuple[Connection, ...]:
    """Introduces this worker to the one that granted the ticket. Returns the unknown connections which that one opened.

    Raises: PeerRefused unless both workers are of this cluster; PeerLost.
    """
    request = introduction_to_proto(introduction)
    sealed = worker.seals.seal(Purpose.INTRODUCTION, receiver_name(ticket.worker_id, ticket.epoch), request)
    with mapped_rpc_errors(f"decode worker {ticket.worker_id}"):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        answer: decode_pb2.IntroduceResponse = await stub.Introduce(sealed, timeout=ticket.lease_s)
    # A process that took over the address of a worker that has ended cannot seal an answer.
    answer = worker.seals.open(Purpose.INTRODUCED, request.nonce, answer, once=False)
    return connections_from_proto(answer.known)


async def answer(worker: Worker, request: decode_pb2.IntroduceRequest) -> decode_pb2.IntroduceResponse:
    """Lets data into the connections of a worker of this cluster. Raises: PeerRefused, RequestError, PeerLost."""
    request = worker.seals.open(Purpose.INTRODUCTION, worker.seal_name, request)
    introduction = introduction_from_proto(request)
    if not isinstance(worker.transport, GuardedTransport):
        raise RequestError(f"Transport {worker.transport.name} takes no introductions.")
    known = answer_to_proto(await answered(introduction, worker.transport.guard))
    return worker.seals.seal(Purpose.INTRODUCED, request.nonce, known, once=False)
