"""Sends the blocks of running requests to the decode workers that they move to, while they are decoded on here."""

from __future__ import annotations

from collections.abc import Mapping

from decode_svc.moves import Moves
from kvtransfer.handover.introduction import Introduction
from kvtransfer.handover.outgoing import OutgoingTransfer, SendStats
from kvtransfer.handover.sealed_ticket import opened_ticket
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.ticket import Commit, Ticket, commit_to_proto
from kvtransfer.transport.own_sockets import Connection
from pdserve.base.errors import PdserveError, StaleError, reason_of
from pdserve.base.ids import BlockId, RequestId
from pdserve.base.logs import get_logger
from pdserve.base.rpc import ChannelPool, mapped_rpc_errors
from pdserve.base.seals import Purpose, receiver_name
from pdserve.base.wire import error_to_wire
from pdserve.v1 import decode_pb2 as pb
from pdserve.v1 import decode_pb2_grpc as pb_grpc
from pdserve.worker.serve.introducing import introduce
from pdserve.worker.serve.worker import Worker

log = get_logger(__name__)

#: Maximum number of channels for commits, one per incarnation of a decode worker. The least recently used is closed.
_MAX_CHANNELS = 64
#: Stands for a choice's first token, which the worker that a request goes to has from the router.
_NO_TOKEN = 0


class Departures:
    """Every transfer out of a decode worker. Belongs to the event loop."""

    def __init__(self, worker: Worker, moves: Moves) -> None:
        self._worker = worker
        self._moves = moves
        self._sender = Sender(
            transport=worker.transport,
            memory=worker.blocks,
            layout=worker.model.layout,
            on_peer=worker.paths.observe,
            introduce=self._introduce,
        )
        self._channels = ChannelPool(max_kept=_MAX_CHANNELS, tls=worker.tls)

    async def send(self, request_id: RequestId, command: pb.HandOff) -> pb.HandedOff:
        """Sends the blocks that the ticket is for. The request runs on, whatever becomes of this."""
        metrics = self._worker.metrics
        try:
            ticket = opened_ticket(command.ticket, request_id, self._worker.seals)
            self._sender.require_compatible(ticket)
            lengths = {each.choice_index: each.num_tokens for each in command.output}
            stats = await self._send(request_id, ticket, lengths)
        except PdserveError as error:
            metrics.ended(reason_of(error))
            log.warning("hand_off_failed", request_id=request_id, reason=error)
            return pb.HandedOff(error=error_to_wire(error))
        metrics.ended("committed")
        metrics.sent(stats.sent_bytes, stats.sent_blocks, stats.busy_s, self._worker.transport.name)
        return pb.HandedOff(sent_bytes=stats.sent_bytes, sent_blocks=stats.sent_blocks, transfer_s=stats.busy_s)

    async def close(self) -> None:
        """Closes the channels."""
        await self._channels.close()

    async def _send(self, request_id: RequestId, ticket: Ticket, lengths: Mapping[int, int]) -> SendStats:
        first = ticket.first_block
        held = await self._worker.run(lambda: self._moves.hold(request_id, lengths, first))
        try:
            if len(held) < ticket.num_blocks:
                raise StaleError(f"Request {request_id} has {len(held)} of the {ticket.num_blocks} blocks to move.")
            async with (
                self._channels.use(ticket.worker_id, ticket.epoch, ticket.grpc_address),  # Connects for the commit.
                self._sender.open(ticket, request_id=request_id) as transfer,
            ):
                await self._push(transfer, ticket, held[: ticket.num_blocks], len(lengths))
                return transfer.stats
        finally:
            # The transfer has been closed: nothing reads the blocks any more.
            await self._worker.run(lambda: self._moves.let_go(request_id))

    async def _push(self, transfer: OutgoingTransfer, ticket: Ticket, blocks: list[BlockId], choices: int) -> None:
        for group in range(ticket.layer_groups):
            await transfer.push(blocks, group=group)
        await transfer.finish([_NO_TOKEN] * choices, lambda commit: self._commit(ticket, commit))

    async def _commit(self, ticket: Ticket, commit: Commit) -> pb.CommitResponse:
        async with self._channels.use(ticket.worker_id, ticket.epoch, ticket.grpc_address) as channel:
            with mapped_rpc_errors(f"decode worker {ticket.worker_id}"):
                receiver = receiver_name(ticket.worker_id, ticket.epoch)
                plain = commit_to_proto(commit, self._worker.numerics_class)
                message = self._worker.seals.seal(Purpose.COMMIT, receiver, plain)
                response: pb.CommitResponse = await pb_grpc.DecodeServiceStub(channel).Commit(message)
                return response

    async def _introduce(self, ticket: Ticket, introduction: Introduction) -> tuple[Connection, ...]:
        async with self._channels.use(ticket.worker_id, ticket.epoch, ticket.grpc_address) as channel:
            return await introduce(self._worker, channel, ticket, introduction)
