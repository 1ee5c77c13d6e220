"""Sends blocks of running requests to the decode workers that the requests move to, while these run on here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from decode_svc.block_sender import BlockSender
from decode_svc.migration.requests import MigratingRequests
from kvtransfer.handover.send_path import SendStats
from kvtransfer.handover.ticket import Ticket
from pdserve.base.errors import PdserveError, StaleError, reason_of
from pdserve.base.ids import RequestId
from pdserve.base.logs import get_logger
from pdserve.base.wire import error_to_wire
from pdserve.v1 import decode_pb2 as pb
from pdserve.worker.serve.worker import Worker

log = get_logger(__name__)


class MigrationSource:
    """The requests that leave a decode worker. Belongs to the event loop."""

    def __init__(self, worker: Worker, migrating: MigratingRequests, sender: BlockSender) -> None:
        self._worker = worker
        self._migrating = migrating
        self._sender = sender

    async def send(self, request_id: RequestId, command: pb.HandOff) -> pb.HandedOff:
        """Sends the blocks that the ticket is for. The request runs on, even if that fails."""
        metrics = self._worker.metrics
        try:
            ticket = self._sender.ticket(command.ticket, request_id)
            lengths = {each.choice_index: each.num_tokens for each in command.output}
            stats = await self._send(request_id, ticket, lengths)
        except PdserveError as error:
            metrics.ended(reason_of(error))
            log.warning("hand_off_failed", request_id=request_id, reason=error)
            return pb.HandedOff(error=error_to_wire(error), number=command.number)
        metrics.ended("committed")
        metrics.sent(stats.sent_bytes, stats.sent_blocks, stats.busy_s, self._worker.transport.name)
        return pb.HandedOff(
            sent_bytes=stats.sent_bytes,
            sent_blocks=stats.sent_blocks,
            transfer_s=stats.busy_s,
            number=command.number,
        )

    async def _send(self, request_id: RequestId, ticket: Ticket, lengths: Mapping[int, int]) -> SendStats:
        hold = partial(self._migrating.hold, request_id, lengths, ticket.first_block)
        async with self._worker.holding(hold, lambda _: self._migrating.let_go(request_id)) as held:
            if len(held) < ticket.num_blocks:
                raise StaleError(f"Request {request_id} has {len(held)} of the {ticket.num_blocks} blocks to move.")
            return await self._sender.send(request_id, ticket, held[: ticket.num_blocks], choices=len(lengths))
