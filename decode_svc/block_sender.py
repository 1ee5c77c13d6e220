"""Sends cached or held blocks of a decode worker to another one, which has granted a ticket for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import grpc

from kvtransfer.handover.sealed_ticket import opened_ticket
from kvtransfer.handover.send_path import SendStats
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.ticket import Commit, Ticket
from pdserve.base.ids import BlockId, RequestId
from pdserve.net.rpc import ChannelPool
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.committing import commit_transfer
from pdserve.worker.serve.data_addresses import DataAddressCalls
from pdserve.worker.serve.worker import Worker

#: Maximum number of channels to decode workers, one per incarnation. The least recently used is closed.
_MAX_CHANNELS = 64
#: Stands for a choice's first token, which the other worker has from the router, or does not need.
_NO_TOKEN = 0


class BlockSender:
    """Every transfer out of a decode worker. Belongs to the event loop."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._sender = Sender(
            transport=worker.transport,
            memory=worker.blocks,
            layout=worker.model.layout,
            on_peer=worker.paths.observe,
            calls=DataAddressCalls(worker, self._channel_to),
        )
        #: Channels to other decode workers.
        self.channels = ChannelPool(max_kept=_MAX_CHANNELS, tls=worker.tls)

    def ticket(self, message: pb.Ticket, request_id: RequestId) -> Ticket:
        """The ticket that a worker of this cluster has granted to this request.

        Raises: PeerRefused, RequestError; LayoutMismatch, TransferError when no blocks of this worker fit it.
        """
        ticket = opened_ticket(message, request_id, self._worker.seals)
        self._sender.require_compatible(ticket)
        return ticket

    async def send(
        self, request_id: RequestId, ticket: Ticket, blocks: Sequence[BlockId], *, choices: int
    ) -> SendStats:
        """Sends the blocks, and returns once they are verified. Nothing reads them any more, however this ends.

        Raises: TransferTimeout when the lease ended, PeerLost, or what the other worker answers to the commit.
        """
        async with (
            self._channel_to(ticket),  # Connects for the commit.
            self._sender.open(ticket, request_id=request_id) as transfer,
        ):
            for group in range(ticket.layer_groups):
                await transfer.push(blocks, group=group)
            await transfer.finish([_NO_TOKEN] * choices, lambda commit: self._commit(ticket, commit))
            return transfer.stats

    async def close(self) -> None:
        """Closes the channels."""
        await self.channels.close()

    async def _commit(self, ticket: Ticket, commit: Commit) -> pb.CommitResponse:
        async with self._channel_to(ticket) as channel:
            return await commit_transfer(self._worker, channel, ticket, commit)

    def _channel_to(self, ticket: Ticket) -> AbstractAsyncContextManager[grpc.aio.Channel]:
        return self.channels.use(ticket.worker_id, ticket.epoch, ticket.grpc_address)
