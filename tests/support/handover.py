"""A prefill and a decode worker that hand blocks over within this process, and the memories that they may have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from kvtransfer.handover.digest import HOST_DIGEST
from kvtransfer.handover.host_offers import HostOffers
from kvtransfer.handover.layer_groups import span_of
from kvtransfer.handover.memory import BlockMemory, Bundle, InPlaceMemory, MessageSpec
from kvtransfer.handover.outgoing import OutgoingTransfer
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import Received, ReceiverIdentity, Reservation
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.staging import StagedMemory
from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport import Buffer
from kvtransfer.transport.inproc import InprocTransport
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.device_event import DeviceEvent
from pdserve.base.errors import PdserveError, TransferError
from pdserve.base.ids import BlockId, Epoch, RequestId, WorkerId
from pdserve.base.layout import KvLayout
from pdserve.base.shared_memory import SharedMemory
from pdserve.base.tasks import service_group
from tests.support.inproc_offers import InprocWithOffers
from tests.support.machine import HOST
from tests.support.virtual_time import VirtualTimeLoop

LAYOUT = KvLayout.uniform(model="m", dtype="float32", block_size=4, num_layers=4, num_kv_heads=1, head_dim=4)
REQUEST = RequestId("r1")
EPOCH = Epoch(77)


class Memory:
    """Blocks of random bytes."""

    def __init__(self, num_blocks: int, seed: int) -> None:
        self.shared = SharedMemory(num_blocks * LAYOUT.block_bytes)
        self.blocks = self.shared.bytes.reshape(num_blocks, LAYOUT.block_bytes)
        self.blocks[:] = np.random.default_rng(seed).integers(0, 256, self.blocks.shape, np.uint8)


def in_place(memory: Memory, layout: KvLayout = LAYOUT) -> InPlaceMemory:
    """Transports read and write the blocks themselves."""
    shared = memory.shared
    return InPlaceMemory(shared.bytes, layout, HostOffers(shared.bytes, layout, shared))


def endpoint_of(transport: InprocTransport) -> DataEndpoint | None:
    """Its end in tickets, where blocks are offered."""
    if not isinstance(transport, InprocWithOffers):
        return None
    return DataEndpoint(host=HOST, lanes=(), local=transport.local_address)


@dataclass(eq=False)
class Pair:
    """A prefill worker, a decode worker, and what the decode worker's requests were notified of."""

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
            block_ids=([BlockId(block_id) for block_id in block_ids],),
            first_blocks=(0,),
            lease_s=lease_s,
            on_received=self.received.append,
            on_expired=self.expired.append,
        )

    async def grant(self, block_ids: list[int], *, attempt: int = 1, lease_s: float = 30.0) -> Ticket:
        return await self.receiver.grant(self.reservation(block_ids, lease_s=lease_s), attempt=attempt)


def not_received(ticket: Ticket) -> Ticket:
    """The same ticket with tags for which no receive is posted, as if the decode worker read nothing."""
    return replace(ticket, tag_base=ticket.tag_base ^ (1 << 40))


async def push_all(transfer: OutgoingTransfer, *ids: int) -> None:
    """Every layer group of these blocks, one group after another."""
    for group in range(transfer._groups.count):
        await transfer.push(blocks(*ids), group=group)


def blocks(*ids: int) -> list[BlockId]:
    """These block ids."""
    return [BlockId(block_id) for block_id in ids]


async def until_idle() -> None:
    """Returns when all other tasks wait for a timer or for this one. Needs `virtual_time`."""
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
    await asyncio.sleep(1e-6)


@asynccontextmanager
async def worker_pair(
    *,
    num_blocks: int = 16,
    max_outstanding_bytes: int = 1 << 20,
    layer_groups: int = 1,
    layout: KvLayout = LAYOUT,
    stage: Callable[[Memory], BlockMemory] = in_place,
    is_local: bool = False,
) -> AsyncIterator[Pair]:
    """Two workers over the inproc transport. `stage` makes their memories, the receiver's first.

    `layout` has blocks of the same size as `LAYOUT`. `is_local`: they offer blocks to each other.
    """
    sending = InprocWithOffers("sender") if is_local else InprocTransport()
    receiving = InprocWithOffers("receiver") if is_local else InprocTransport()
    source, target = Memory(num_blocks, 1), Memory(num_blocks, 2)
    identity = ReceiverIdentity(
        worker_id=WorkerId("d0"),
        epoch=EPOCH,
        grpc_address="d0:1",
        layout=layout,
        layer_groups=layer_groups,
        data_endpoint=endpoint_of(receiving),
    )
    async with service_group() as tasks:
        pair = Pair(
            receiver=Receiver(transport=receiving, memory=stage(target), identity=identity, tasks=tasks),
            sender=Sender(
                transport=sending, memory=stage(source), layout=layout, max_outstanding_bytes=max_outstanding_bytes
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


class Copies:
    """Implements `BlockCopies` for the blocks of a `Memory`. Copies end while `may_end` is set."""

    def __init__(self, memory: Memory, stage: Buffer, layout: KvLayout = LAYOUT) -> None:
        self._blocks = memory.blocks
        self._stage = stage
        self._layout = layout
        self.fails = False
        self.may_end = asyncio.Event()
        self.may_end.set()
        #: Blocks and layers of each copy that was started.
        self.started: list[list[int]] = []
        self.layers: list[tuple[int, int]] = []
        #: Events after which the copies read.
        self.events: list[DeviceEvent | None] = []
        self.has_started = asyncio.Event()

    digest = HOST_DIGEST

    async def read(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        await self._copy(bundles, spec.layers)
        self.events.append(spec.after)
        digests = []
        for message, rows in self._views(bundles, slots, spec):
            message[:] = rows
            digests.append(spec.digest(message.reshape(-1)))
        return digests

    async def write(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        await self._copy(bundles, spec.layers)
        digests = []
        for bundle, (message, _) in zip(bundles, self._views(bundles, slots, spec), strict=True):
            self._blocks[list(bundle), self._span(spec)] = message
            digests.append(spec.digest(message.reshape(-1)))
        return digests

    def _views(
        self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec
    ) -> Iterator[tuple[Buffer, Buffer]]:
        """Each bundle's message in the stage, and the layers of its blocks, both with a row per block."""
        span = self._span(spec)
        for bundle, slot in zip(bundles, slots, strict=True):
            first = slot * LAYOUT.block_bytes
            message = self._stage[first + len(bundle) * span.start : first + len(bundle) * span.stop]
            yield message.reshape(len(bundle), -1), self._blocks[list(bundle), span]

    def _span(self, spec: MessageSpec) -> slice:
        return span_of(spec.layers, self._layout.groups[spec.kv_group].num_layers, self._layout.block_bytes)

    async def _copy(self, bundles: Sequence[Bundle], layers: slice) -> None:
        self.started.append([block for bundle in bundles for block in bundle])
        self.layers.append((layers.start, layers.stop))
        self.has_started.set()
        await asyncio.sleep(0)
        await self.may_end.wait()
        if self.fails:
            raise TransferError("a rank is gone")


def staged(memory: Memory, num_slots: int = 4) -> StagedMemory:
    """A stage of `num_slots` blocks."""
    return staged_with_copies(memory, num_slots)[0]


def staged_with_copies(
    memory: Memory, num_slots: int, bundle_blocks: int = 1, layout: KvLayout = LAYOUT
) -> tuple[StagedMemory, Copies]:
    """A stage of `num_slots` blocks, and the copies to and from it."""
    stage = np.zeros(num_slots * LAYOUT.block_bytes, np.uint8)
    copies = Copies(memory, stage, layout)
    return StagedMemory(copies, stage, LAYOUT.block_bytes, bundle_blocks), copies


class Stages:
    """Makes the stages of a pair and keeps them: `made[0]` is the receiver's, `made[1]` the sender's."""

    def __init__(self, *num_slots: int, bundle_blocks: int = 1) -> None:
        """`num_slots`: of the sender's stage, then of the receiver's."""
        self._num_slots = list(num_slots)
        self._bundle_blocks = bundle_blocks
        self.made: list[StagedMemory] = []
        self.copies: list[Copies] = []

    def __call__(self, memory: Memory) -> StagedMemory:
        # `worker_pair` makes the receiver's first.
        stage, copies = staged_with_copies(memory, self._num_slots[1 - len(self.made)], self._bundle_blocks)
        self.made.append(stage)
        self.copies.append(copies)
        return stage

    @property
    def are_empty(self) -> bool:
        return all(stage.num_free == stage.max_blocks for stage in self.made)
