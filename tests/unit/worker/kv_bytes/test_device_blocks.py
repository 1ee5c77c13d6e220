"""Blocks that stop over in a device's own memory: handed over by the protocol, verified by what the device digests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
import torch

from tests.support.devices import DEVICE

pytest.importorskip("triton")

from kernels.reference import blocks as reference
from kvtransfer.handover.digest import DEVICE_DIGEST, MessageDigest
from kvtransfer.handover.memory import InPlaceMemory, MessageSpec
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import Received, ReceiverIdentity, Reservation
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.staging import StagedMemory
from kvtransfer.transport import Buffer, Operation, Peer, open_transport
from kvtransfer.transport.inproc import InprocTransport
from pdserve.base.errors import DigestMismatch, PdserveError, TransferError
from pdserve.base.gpu_memory import GpuBytes
from pdserve.base.ids import BlockId, Epoch, RequestId, WorkerId
from pdserve.base.layout import KvLayout
from pdserve.base.tasks import service_group
from pdserve.engine.kv_cache import KvCache
from pdserve.worker.kv_bytes.device_blocks import DeviceCopies, staged_on_device
from tests.support.deadline import DEADLINE_S

LAYOUT = KvLayout.uniform(model="m", dtype="bfloat16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
REQUEST = RequestId("r1")
DIGEST = MessageDigest(b"k" * 32)
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="messages within a process are copied by the host")


def filled(num_blocks: int, seed: int) -> KvCache:
    cache = KvCache(LAYOUT, num_blocks, DEVICE)
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(seed)))
    return cache


def staged(cache: KvCache, num_slots: int = 8, bundle_blocks: int = 2) -> StagedMemory:
    stage = torch.full((num_slots * LAYOUT.block_bytes,), 0xA5, dtype=torch.uint8, device=DEVICE)
    return staged_on_device(cache, stage, bundle_blocks)


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(block) for block in ids]


@dataclass(eq=False)
class Pair:
    """The two ends of a transfer, and the callbacks that the decode worker received."""

    source: KvCache
    target: KvCache
    sender: Sender
    receiver: Receiver
    sending: InprocTransport
    stages: list[StagedMemory]
    received: list[Received] = field(default_factory=list)
    expired: list[PdserveError] = field(default_factory=list)

    def reservation(self, *ids: int) -> Reservation:
        return Reservation(
            request_id=REQUEST,
            block_ids=(blocks(*ids),),
            first_blocks=(0,),
            lease_s=30.0,
            on_received=self.received.append,
            on_expired=self.expired.append,
        )


@asynccontextmanager
async def pair_of(*, layer_groups: int = 1) -> AsyncIterator[Pair]:
    source, target = filled(9, 1), filled(9, 2)
    stages = [staged(source), staged(target)]
    sending, receiving = InprocTransport(), InprocTransport()
    identity = ReceiverIdentity(
        worker_id=WorkerId("d0"), epoch=Epoch(7), grpc_address="d0:1", layout=LAYOUT, layer_groups=layer_groups
    )
    async with service_group() as tasks:
        receiver = Receiver(transport=receiving, memory=stages[1], identity=identity, tasks=tasks)
        sender = Sender(transport=sending, memory=stages[0], layout=LAYOUT)
        yield Pair(source, target, sender, receiver, sending, stages)
        await receiver.close()
        await sending.close()
        await receiving.close()
    assert all(stage.num_free == stage.max_blocks for stage in stages)


@pytest.mark.parametrize("layer_groups", [1, 2, 3])
async def test_blocks_arrive_with_the_devices_digests(layer_groups: int) -> None:
    async with pair_of(layer_groups=layer_groups) as pair:
        before = pair.target.tensor.clone()
        ticket = await pair.receiver.grant(pair.reservation(8, 2, 5), attempt=1)
        assert (ticket.digest, ticket.bundle_blocks) == (DEVICE_DIGEST, 2)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            for group in range(layer_groups):
                await transfer.push(blocks(1, 7, 3), group=group)
            await transfer.finish([5], pair.receiver.commit)
        assert torch.equal(pair.target.tensor[[8, 2, 5]], pair.source.tensor[[1, 7, 3]])
        others = [0, 1, 3, 4, 6, 7]
        assert torch.equal(pair.target.tensor[others], before[others])
        assert len(pair.received) == 1


async def test_a_wrong_bit_is_found_by_the_device_and_never_becomes_a_token() -> None:
    async with pair_of() as pair:
        post_send = pair.sending.post_send

        def corrupting(peer: Peer, tag: int, buffer: Buffer) -> Operation:
            buffer = buffer.copy()
            buffer[LAYOUT.block_bytes + 11] ^= 4
            return post_send(peer, tag, buffer)

        pair.sending.post_send = corrupting  # type: ignore[method-assign]
        ticket = await pair.receiver.grant(pair.reservation(0, 1), attempt=1)
        with pytest.raises(DigestMismatch, match="1 of 1 bundles are not what was sent"):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await transfer.push(blocks(4, 5))
                await transfer.finish([5], pair.receiver.commit)
        await pair.receiver.abort(ticket.transfer_id)
        assert pair.received == []


async def test_digests_are_the_references_of_each_block_keyed_for_the_transfer() -> None:
    cache = filled(4, 3)
    memory = staged(cache)
    bundle = blocks(3, 0)
    [buffer] = await memory.lend([bundle])
    [given] = await memory.load([bundle], [buffer], MessageSpec(layers=slice(1, 3), digest=DIGEST))
    content = cache.tensor[[3, 0], 1:3].reshape(2, -1).view(torch.uint8)
    keys = reference.digest_keys(DIGEST.device_key, content.shape[1], CPU)
    assert given == DIGEST.of_blocks(reference.digest(content, keys).numpy().tobytes())
    assert np.array_equal(buffer[2 * LAYOUT.block_bytes // 3 :], content.flatten().numpy())
    [other] = await memory.load([bundle], [buffer], MessageSpec(layers=slice(1, 3), digest=MessageDigest(b"l" * 32)))
    assert other != given
    assert await memory.store([bundle], [buffer], MessageSpec(layers=slice(1, 3), digest=DIGEST)) == [given]


async def test_a_ticket_for_other_digests_is_refused_with_a_remedy() -> None:
    async with pair_of() as pair:
        ticket = await pair.receiver.grant(pair.reservation(0), attempt=1)
        memory = InPlaceMemory(np.zeros(LAYOUT.block_bytes, np.uint8), LAYOUT)
        on_host = Sender(transport=pair.sending, memory=memory, layout=LAYOUT)
        with pytest.raises(TransferError, match=r"'nh' digests and .* 'xxh3' digests. .* same --handover-memory"):
            async with on_host.open(ticket, request_id=REQUEST):
                pass
        await pair.receiver.abort(ticket.transfer_id)


def test_bytes_in_gpu_memory_have_the_cuda_array_interface() -> None:
    memory = torch.zeros(100, dtype=torch.uint8)
    span = GpuBytes(0, memory.data_ptr(), memory.nbytes, memory)[10:30]
    assert (len(span), span.nbytes, span.ndim) == (20, 20, 1)
    assert span.__cuda_array_interface__["data"] == (memory.data_ptr() + 10, False)
    assert span.__cuda_array_interface__["shape"] == (20,)
    Operation(1, span)  # type: ignore[arg-type]


class Writing:
    """An event after which a step has written a block."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache

    def wait(self) -> None:
        self._cache.tensor[3] = 7


async def test_blocks_are_packed_after_the_event_at_which_they_are_written() -> None:
    cache = filled(4, 3)
    memory = staged(cache)
    bundle = blocks(3)
    [buffer] = await memory.lend([bundle])
    await memory.load([bundle], [buffer], MessageSpec(layers=slice(0, 3), digest=DIGEST, after=Writing(cache)))
    assert (torch.from_numpy(buffer).view(torch.bfloat16) == 7).all()


def test_warming_up_changes_no_block() -> None:
    cache = filled(3, 4)
    before = cache.tensor.clone()
    stage = torch.zeros(16 * LAYOUT.block_bytes, dtype=torch.uint8, device=DEVICE)
    DeviceCopies(cache, stage).warm_up()
    assert stage.any()
    assert torch.equal(cache.tensor, before)


async def test_a_gpu_without_memory_ends_the_transfer_and_not_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = staged(filled(4, 3))
    bundle = blocks(3)
    [buffer] = await memory.lend([bundle])

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("exhausted")

    monkeypatch.setattr("kernels.triton.blocks.pack", full)
    with pytest.raises(TransferError, match="The GPU has no memory left to pack blocks: exhausted"):
        await memory.load([bundle], [buffer], MessageSpec(layers=slice(0, 3), digest=DIGEST))


async def test_ucx_takes_bytes_by_their_address() -> None:
    # UCX finds that this memory is the host's. For a GPU's memory, the call starts the same.
    sent, landed = torch.arange(1 << 20).to(torch.uint8), torch.zeros(1 << 20, dtype=torch.uint8)
    ours, theirs = open_transport("ucx"), open_transport("ucx")
    receive = theirs.post_receive(5, cast(Buffer, GpuBytes(0, landed.data_ptr(), landed.nbytes, landed)))
    peer = await ours.connect(await theirs.listen())
    async with asyncio.timeout(DEADLINE_S):
        await ours.post_send(peer, 5, cast(Buffer, GpuBytes(0, sent.data_ptr(), sent.nbytes, sent)))
        await receive
    assert torch.equal(landed, sent)
    await ours.close()
    await theirs.close()
