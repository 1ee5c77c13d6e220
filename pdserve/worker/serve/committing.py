"""The commit of a transfer over gRPC, with which its sender asks the decode worker to verify what has arrived."""

from __future__ import annotations

import grpc

from kvtransfer.handover.ticket import Commit, Ticket, commit_to_proto
from pdserve.net.rpc import mapped_rpc_errors
from pdserve.peers.seals import Purpose, receiver_name
from pdserve.v1 import decode_pb2, decode_pb2_grpc
from pdserve.worker.serve.worker import Worker


async def commit_transfer(
    worker: Worker, channel: grpc.aio.Channel, ticket: Ticket, commit: Commit
) -> decode_pb2.CommitResponse:
    """The answer of the decode worker that has granted the ticket. Raises what it answers, or `PeerLost`."""
    plain = commit_to_proto(commit, worker.numerics_class)
    message = worker.seals.seal(Purpose.COMMIT, receiver_name(ticket.worker_id, ticket.epoch), plain)
    with mapped_rpc_errors(f"decode worker {ticket.worker_id}"):
        response: decode_pb2.CommitResponse = await decode_pb2_grpc.DecodeServiceStub(channel).Commit(message)
        return response
