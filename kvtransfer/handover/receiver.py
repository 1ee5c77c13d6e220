"""The decode worker's end of the handover: grants tickets, and routes commits and commands to their transfers."""

from __future__ import annotations

from kvtransfer.handover import transfer_errors
from kvtransfer.handover.data_address import DataAddress, data_address
from kvtransfer.handover.incoming import IncomingTransfer
from kvtransfer.handover.layer_groups import TransferShape, layer_groups_of
from kvtransfer.handover.memory import BlockMemory
from kvtransfer.handover.reservation import Received, ReceiverIdentity, Reservation
from kvtransfer.handover.ticket import MAX_MESSAGES, Commit, Ticket, new_key, new_tag_base
from kvtransfer.transport import LocalTransports, Transport
from pdserve.base.ids import TransferId, new_transfer_id
from pdserve.base.tasks import ServiceGroup


class Receiver:
    """Every transfer into this worker. Use it from the event loop that opened the transport."""

    def __init__(
        self, *, transport: Transport, memory: BlockMemory, identity: ReceiverIdentity, tasks: ServiceGroup
    ) -> None:
        self._transport = transport
        self._memory = memory
        self._identity = identity
        self._tasks = tasks
        self._transfers: dict[TransferId, IncomingTransfer] = {}

    @property
    def num_transfers(self) -> int:
        """Number of tickets whose blocks can still be written."""
        return sum(not transfer.is_over for transfer in self._transfers.values())

    async def grant(self, reservation: Reservation, *, attempt: int) -> Ticket:
        """Returns a ticket, whose messages may then arrive. Raises: SetupError when the transport does not come up."""
        shape = self._shape_of(reservation)
        ticket = self._new_ticket(reservation, attempt, shape, await self._data_address(reservation))
        transfer = IncomingTransfer(
            ticket,
            reservation,
            transport=self._transport,
            memory=self._memory,
            tasks=self._tasks,
            forget=self._forget,
        )
        self._transfers[ticket.transfer_id] = transfer
        transfer.start()
        return ticket

    def keep_lease(self, transfer_id: TransferId) -> None:
        """The prefill worker computes: its silence on the wire is progress. Unknown transfers are ignored."""
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            transfer.keep_lease()

    async def commit(self, commit: Commit) -> Received:
        """Waits, at most for the lease, for messages that the commit has overtaken, and verifies all of them.

        `Reservation.on_received` has been called when it returns. A repeated commit gets the same answer.
        Raises: StaleEpoch, StaleAttempt, StaleError for a transfer that is over; DigestMismatch for a wrong MAC (the
            transfer goes on) or wrong bytes (no commit of it will succeed); PeerLost; TransferTimeout.
        """
        if commit.epoch != self._identity.epoch:
            raise transfer_errors.worker_restarted(self._identity.worker_id)
        transfer = self._transfers.get(commit.transfer_id)
        if transfer is None:
            raise transfer_errors.unknown_transfer(commit.request_id)
        return await transfer.commit(commit)

    async def abort(self, transfer_id: TransferId) -> None:
        """Withdraws a transfer. When it returns or raises, nothing writes to its blocks any more.

        A transfer that is over already is left alone. A cancelled caller still waits for the blocks to be quiet.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is not None:
            await transfer.abort()

    async def renew(self, transfer_id: TransferId, *, attempt: int) -> Ticket:
        """A fresh ticket for the same blocks, after the prefill worker was lost. The old one is dead before it returns.

        When it raises anything but StaleError, the reservation is over and its blocks are quiet.
        Raises: StaleError when the reservation is over already (expired, aborted or committed).
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            raise transfer_errors.reservation_over()
        await transfer.end_for(attempt)
        return await self.grant(transfer.reservation, attempt=attempt)

    async def close(self) -> None:
        """Aborts every transfer; the blocks are quiet when it returns."""
        for transfer in list(self._transfers.values()):
            await transfer.close()
        self._transfers.clear()

    def _forget(self, ticket: Ticket) -> None:
        self._transfers.pop(ticket.transfer_id, None)

    def _shape_of(self, reservation: Reservation) -> TransferShape:
        num_blocks, groups = sum(map(len, reservation.block_ids)), self._identity.layer_groups
        if num_blocks * groups > MAX_MESSAGES:
            raise ValueError(f"A ticket covers at most {MAX_MESSAGES} messages, not {num_blocks} blocks of {groups}.")
        return TransferShape.of(
            num_blocks=[len(block_ids) for block_ids in reservation.block_ids],
            layer_groups=layer_groups_of(self._identity.layout, groups),
            bundle_blocks=self._memory.bundle_blocks,
        )

    async def _data_address(self, reservation: Reservation) -> DataAddress:
        """The address for senders of other hosts; none until one has asked for it."""
        transport = self._transport
        if (
            reservation.senders_ask
            and isinstance(transport, LocalTransports)
            and transport.local_address is not None
            and not transport.listens
        ):
            return DataAddress(address=b"")
        return data_address(transport, await transport.listen())

    def _new_ticket(self, reservation: Reservation, attempt: int, shape: TransferShape, data: DataAddress) -> Ticket:
        first_block, *other_first_blocks = reservation.first_blocks
        return Ticket(
            transfer_id=new_transfer_id(),
            attempt=attempt,
            worker_id=self._identity.worker_id,
            epoch=self._identity.epoch,
            grpc_address=self._identity.grpc_address,
            transport=self._transport.name,
            data_address=data.address,
            first_block=first_block,
            other_first_blocks=tuple(other_first_blocks),
            num_blocks=shape.segments[0].num_blocks,
            layout=self._identity.layout,
            lease_s=reservation.lease_s,
            key=new_key(),
            tag_base=new_tag_base(),
            layer_groups=self._identity.layer_groups,
            bundle_blocks=self._memory.bundle_blocks,
            digest=self._memory.digest,
            data_endpoint=self._identity.data_endpoint,
            guarded_addresses=data.guarded_addresses,
        )
