"""A pair of workers over the inproc transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from kvtransfer.handover.memory import BlockMemory, InPlaceMemory
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import Received, ReceiverIdentity, Reservation
from kvtransfer.handover.sender import OutgoingTransfer, Sender
from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport import Buffer
from kvtransfer.transport.inproc import InprocTransport
from pdserve.base.errors import PdserveError
from pdserve.base.ids import BlockId, Epoch, RequestId, WorkerId
from pdserve.base.layout import KvLayout
from pdserve.base.tasks import service_group

LAYOUT = KvLayout(model="m", dtype="float32", block_size=4, num_layers=4, num_kv_heads=1, head_dim=4)
REQUEST = RequestId("r1")
EPOCH = Epoch(77)


class Memory:
    """Blocks of random bytes."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.blocks = np.random.default_rng(seed).integers(0, 256, (num_blocks, LAYOUT.block_bytes), np.uint8)

    def block_bytes_view(self, block_id: BlockId) -> Buffer:
        view: Buffer = self.blocks[block_id]
        return view


def in_place(memory: Memory) -> InPlaceMemory:
    return InPlaceMemory(memory, LAYOUT.num_layers)


@dataclass(eq=False)
class Pair:
    """A prefill worker, a decode worker, and what the decode worker was told."""

    receiver: Receiver
    sender: Sender
    source: Memory
    target: Memory
    sending: InprocTransport
    receiving: InprocTransport
    received: list[Received] = field(default_factory=list)
    expired: list[PdserveError] = field(default_factory=list)

    def reservation(self, block_ids: list[int], *, lease_s: float = 30.0) -> Reservation:
        return Reservation(
            request_id=REQUEST,
            block_ids=[BlockId(block_id) for block_id in block_ids],
            first_block=0,
            lease_s=lease_s,
            on_received=self.received.append,
            on_expired=self.expired.append,
        )

    async def grant(self, block_ids: list[int], *, attempt: int = 1, lease_s: float = 30.0) -> Ticket:
        return await self.receiver.grant(self.reservation(block_ids, lease_s=lease_s), attempt=attempt)


async def push_all(transfer: OutgoingTransfer, *ids: int) -> None:
    """Every group of layers of these blocks, one group after another."""
    for group in range(transfer._groups.count):
        await transfer.push(blocks(*ids), group=group)


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(block_id) for block_id in ids]


@asynccontextmanager
async def worker_pair(
    *,
    num_blocks: int = 16,
    max_outstanding_bytes: int = 1 << 20,
    layer_groups: int = 1,
    stage: Callable[[Memory], BlockMemory] = in_place,
) -> AsyncIterator[Pair]:
    sending, receiving = InprocTransport(), InprocTransport()
    source, target = Memory(num_blocks, 1), Memory(num_blocks, 2)
    identity = ReceiverIdentity(
        worker_id=WorkerId("d0"), epoch=EPOCH, grpc_address="d0:1", layout=LAYOUT, layer_groups=layer_groups
    )
    async with service_group() as tasks:
        pair = Pair(
            receiver=Receiver(transport=receiving, memory=stage(target), identity=identity, tasks=tasks),
            sender=Sender(
                transport=sending, memory=stage(source), layout=LAYOUT, max_outstanding_bytes=max_outstanding_bytes
            ),
            source=source,
            target=target,
            sending=sending,
            receiving=receiving,
        )
        yield pair
        await pair.receiver.close()
        await sending.close()
        await receiving.close()
