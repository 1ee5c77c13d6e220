"""How long handovers between two GPU workers of a host take, by a model of what each step costs.

The protocol is the product's; launches, events, messages and copies are delays of a virtual clock. The costs are those
of an H200: a launch from Python 40 us, an event until the event loop knows of it 60 us, a message between the processes
80 us. A copy takes the time of its bytes, read and written at 4,273 GB/s; to or from host memory, 50 GB/s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("triton")

from kvtransfer.handover.memory import Bundle, Digests, MessageSpec
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import ReceiverIdentity, Reservation
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.staging import StagedMemory
from kvtransfer.transport.base import Operation, Peer
from kvtransfer.transport.local.offer import Offer
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.ids import BlockId, RequestId, WorkerId, new_epoch
from pdserve.base.layout import KvLayout
from pdserve.base.shared_memory import ShareableMemory
from pdserve.base.tasks import service_group
from pdserve.worker.kv_bytes.staged_offers import STAGE_BYTES, Frames, StagedOffers
from tests.support.handover import Copies, Memory
from tests.support.inproc_offers import InprocWithOffers
from tests.support.machine import HOST

pytestmark = pytest.mark.virtual_time

LAUNCH_S, EVENT_S, MESSAGE_S = 40e-6, 60e-6, 80e-6
#: Time in which a layer group of a prompt of 1,024 tokens is computed.
STEP_S = 7e-3
#: Bytes copied per second: each is read and written.
COPY_BYTES_PER_S = 4273e9 / 2
#: The same between a GPU and the host.
LINK_BYTES_PER_S = 50e9
#: Blocks of 16 tokens of an 8B model.
LAYOUT = KvLayout.uniform(model="m", dtype="bfloat16", block_size=16, num_layers=32, num_kv_heads=8, head_dim=128)
LAYER_GROUPS = 4
RUN_BYTES = 256 << 20
MIB = 1 << 20


class Busy:
    """Something that does one thing at a time: an event loop, or a GPU."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self.busy_s = 0.0

    async def use(self, seconds: float) -> None:
        async with self._lock:
            self.busy_s += seconds
            await asyncio.sleep(seconds)


@dataclass(eq=False)
class Modelled:
    """Implements `OfferedMemory` and `OfferSource` for a worker whose launches and copies take their time."""

    shared: ShareableMemory
    loop: Busy = field(default_factory=Busy)
    engine: Busy = field(default_factory=Busy)
    run_bytes: tuple[int, int] = (RUN_BYTES, RUN_BYTES)
    is_bounded: bool = False

    @property
    def memories(self) -> list[ShareableMemory]:
        return [self.shared]

    def sources_for(self, end: DataEndpoint) -> list[Modelled]:
        return [self]

    async def open(self) -> None:
        pass

    def block_bytes(self, spec: MessageSpec) -> int:
        return LAYOUT.block_bytes // LAYOUT.num_layers * (spec.layers.stop - spec.layers.start)

    async def prepare(self, bundles: Sequence[Bundle], spec: MessageSpec) -> Prepared:
        await asyncio.sleep(EVENT_S)
        return Prepared(self, bundles, spec)

    async def digests(self, bundles: Sequence[Bundle], spec: MessageSpec) -> Digests:
        await self.loop.use(LAUNCH_S)
        # It reads what the copy reads and writes.
        computing = asyncio.create_task(self.engine.use(self._copy_s(bundles, spec) / 2))
        return Found(computing, len(bundles))

    async def pull(
        self, source: object, starts: npt.NDArray[np.int64], bundles: Sequence[Bundle], spec: MessageSpec
    ) -> list[bytes]:
        await self.loop.use(LAUNCH_S)
        await self.engine.use(self._copy_s(bundles, spec))
        await asyncio.sleep(EVENT_S)
        return [bytes(16)] * len(bundles)

    def _copy_s(self, bundles: Sequence[Bundle], spec: MessageSpec) -> float:
        return sum(map(len, bundles)) * self.block_bytes(spec) / COPY_BYTES_PER_S


@dataclass(eq=False)
class ModelledStage(Modelled):
    """Blocks pass through host memory. The engines are the links of both GPUs."""

    run_bytes: tuple[int, int] = StagedOffers.run_bytes
    is_bounded: bool = True
    frames: Frames = field(default_factory=lambda: Frames(STAGE_BYTES // LAYOUT.block_bytes))

    async def prepare(self, bundles: Sequence[Bundle], spec: MessageSpec) -> Prepared:
        await asyncio.sleep(EVENT_S)
        taken = await self.frames.take(-(-sum(map(len, bundles)) // LAYER_GROUPS))
        await self.loop.use(LAUNCH_S)
        await self.engine.use(self._copy_s(bundles, spec))
        await asyncio.sleep(EVENT_S)
        return Prepared(self, bundles, spec, partial(self.frames.give_back, taken))

    async def digests(self, bundles: Sequence[Bundle], spec: MessageSpec) -> Digests:
        return Found(asyncio.create_task(asyncio.sleep(0)), len(bundles))

    def _copy_s(self, bundles: Sequence[Bundle], spec: MessageSpec) -> float:
        return sum(map(len, bundles)) * self.block_bytes(spec) / LINK_BYTES_PER_S


@dataclass
class Prepared:
    """Implements `PreparedBlocks`."""

    memory: Modelled
    bundles: Sequence[Bundle]
    spec: MessageSpec
    release: Callable[[], None] = lambda: None

    @property
    def starts(self) -> npt.NDArray[np.int64]:
        return np.zeros(sum(map(len, self.bundles)), np.int64)

    async def digests(self) -> Digests:
        return await self.memory.digests(self.bundles, self.spec)


@dataclass
class Found:
    """Implements `Digests`."""

    computing: asyncio.Task[None]
    count: int

    async def found(self) -> list[bytes]:
        await self.computing
        await asyncio.sleep(EVENT_S)
        return [bytes(16)] * self.count


class Distant(InprocWithOffers):
    """Offers, and their ends, arrive after the time of a message."""

    def offer(self, peer: Peer, memory: ShareableMemory, offer: Offer) -> Operation:
        sent, loop = Operation(offer.first_tag, memory.bytes), asyncio.get_running_loop()

        def arrive() -> None:
            super(Distant, self).offer(peer, memory, offer).add_done_callback(ended)

        def ended(operation: Operation) -> None:
            loop.call_later(MESSAGE_S, sent.complete)

        loop.call_later(MESSAGE_S, arrive)
        return sent


class NeverUsed(Copies):
    """A stage that no block passes."""

    async def _copy(self, bundles: Sequence[Bundle], layers: slice) -> None:
        raise AssertionError("a block went through the stage")


@dataclass(frozen=True)
class Times:
    """In seconds, of virtual time."""

    #: Time from the first push to the last commit.
    total: float
    #: Time in which the slowest stage of the pipeline was busy.
    slowest: float
    #: Times from the last push to the commit of each transfer.
    exposed: tuple[float, ...]


async def hand_over(
    num_transfers: int, num_bytes: int, *, is_computing: bool = False, worker: type[Modelled] = Modelled
) -> Times:
    """Hands prompts over, all at once. `is_computing`: their last layer group comes when the others have left."""
    num_blocks = num_bytes // LAYOUT.block_bytes
    memory = Memory(1, 1)
    ends = [worker(memory.shared), worker(memory.shared)]
    stages = [
        StagedMemory(
            NeverUsed(memory, np.zeros(MIB, np.uint8)), np.zeros(32 * MIB, np.uint8), LAYOUT.block_bytes, 16, end
        )
        for end in ends
    ]
    sending, receiving = Distant("sender"), Distant("receiver")
    identity = ReceiverIdentity(
        worker_id=WorkerId("d"),
        epoch=new_epoch(),
        grpc_address="d:1",
        layout=LAYOUT,
        layer_groups=LAYER_GROUPS,
        data_endpoint=DataEndpoint(host=HOST, lanes=(), local=receiving.local_address),
    )
    blocks, clock = [BlockId(block) for block in range(num_blocks)], asyncio.get_running_loop().time
    exposed = list[float]()

    async def one(request: RequestId, receiver: Receiver, sender: Sender) -> None:
        reservation = Reservation(
            request_id=request,
            block_ids=(blocks,),
            first_blocks=(0,),
            lease_s=30.0,
            on_received=lambda received: None,
            on_expired=lambda error: None,
        )
        ticket = await receiver.grant(reservation, attempt=1)
        async with sender.open(ticket, request_id=request) as transfer:
            for group in range(LAYER_GROUPS):
                if is_computing and group == LAYER_GROUPS - 1:
                    await asyncio.sleep(STEP_S)
                pushed_at = clock()
                await transfer.push(blocks, group=group)
            await transfer.finish([1], receiver.commit)
            exposed.append(clock() - pushed_at)

    async with service_group() as tasks:
        receiver = Receiver(transport=receiving, memory=stages[1], identity=identity, tasks=tasks)
        sender = Sender(transport=sending, memory=stages[0], layout=LAYOUT)
        started_at = clock()
        await asyncio.gather(*(one(RequestId(f"r{number}"), receiver, sender) for number in range(num_transfers)))
        total = clock() - started_at
        await receiver.close()
    busy = [stage.busy_s for end in ends for stage in (end.loop, end.engine)]
    return Times(total, max(busy), tuple(exposed))


async def test_64_prompts_at_once_take_hardly_longer_than_the_slowest_stage_and_wait_for_no_memory() -> None:
    times = await hand_over(64, 128 * MIB)
    assert times.total <= 1.3 * times.slowest


async def test_large_prompts_are_handed_over_at_the_speed_of_the_copy() -> None:
    times = await hand_over(8, 1024 * MIB)
    assert times.total <= 1.3 * times.slowest
    assert 8 * 1024 * MIB / times.total >= 1500e9


async def test_one_large_prompt_is_handed_over_at_300_gb_a_second() -> None:
    times = await hand_over(1, 1024 * MIB)
    assert 1024 * MIB / times.total >= 300e9


async def test_64_prompts_at_once_pass_through_host_memory_at_the_speed_of_the_links() -> None:
    times = await hand_over(64, 128 * MIB, worker=ModelledStage)
    assert times.total <= 1.3 * times.slowest


async def test_one_large_prompt_passes_through_host_memory_at_20_gb_a_second() -> None:
    times = await hand_over(1, 1024 * MIB, worker=ModelledStage)
    assert 1024 * MIB / times.total >= 20e9


async def test_less_than_a_millisecond_is_left_behind_the_last_layer_group() -> None:
    times = await hand_over(1, 128 * MIB, is_computing=True)
    assert times.exposed[0] <= 1e-3
