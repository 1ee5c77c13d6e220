"""Blocks on a GPU that are offered within the host: one launch a side, no allocation, no wait for a step or a stage."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.devices import DEVICE, HAS_GPU, SIMULATED, gpu_only, keep_busy

pytest.importorskip("triton")

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.layer_groups import LayerGroups
from kvtransfer.handover.memory import MessageSpec
from kvtransfer.handover.outgoing import OutgoingTransfer
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import Received, ReceiverIdentity, Reservation
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.staging import StagedMemory
from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport import Buffer
from kvtransfer.transport.local.address import LocalAddress
from kvtransfer.transport.path import DataEndpoint
from pdserve.base import gpu_memory
from pdserve.base.errors import DigestMismatch, PeerLost, SetupError, TransferError
from pdserve.base.ids import BlockId, RequestId, WorkerId, new_epoch
from pdserve.base.layout import KvLayout
from pdserve.base.shared_memory import ShareableMemory, SharedMemory, map_to_read
from pdserve.base.tasks import service_group
from pdserve.engine.kv_cache import KvCache
from pdserve.worker.kv_bytes import device_launches
from pdserve.worker.kv_bytes.device_blocks import staged_on_device
from pdserve.worker.kv_bytes.device_offers import DeviceOffers
from pdserve.worker.kv_bytes.digest_keys import DigestKeys
from pdserve.worker.kv_bytes.staged_offers import Frames, StagedOffers
from tests.support.inproc_offers import InprocWithOffers, LocalPeer
from tests.support.machine import HOST

LAYOUT = KvLayout.uniform(model="m", dtype="bfloat16", block_size=4, num_layers=3, num_kv_heads=2, head_dim=8)
REQUEST = RequestId("r1")
GPU = "GPU-1"
SPEC = MessageSpec(layers=slice(0, 2), digest=MessageDigest(b"k" * 32))


def cache_of(num_blocks: int, seed: int) -> KvCache:
    cache = KvCache(LAYOUT, num_blocks, DEVICE, is_shared=True)
    assert cache.shared is not None
    assert not cache.tensor.any()
    cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=torch.Generator().manual_seed(seed)))
    if HAS_GPU:
        torch.cuda.synchronize()
    return cache


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(block) for block in ids]


@dataclass(eq=False)
class Pair:
    """Two workers that share a GPU, and what the decode worker received."""

    source: KvCache
    target: KvCache
    offers: list[DeviceOffers]
    sender: Sender
    receiver: Receiver
    received: list[Received] = field(default_factory=list)

    async def grant(self, *ids: int, lease_s: float = 60.0) -> Ticket:
        reservation = Reservation(
            request_id=REQUEST,
            block_ids=(blocks(*ids),),
            first_blocks=(0,),
            lease_s=lease_s,
            on_received=self.received.append,
            on_expired=lambda error: None,
        )
        return await self.receiver.grant(reservation, attempt=1)


def memory_of(cache: KvCache, offers: DeviceOffers) -> StagedMemory:
    """A stage of one bundle, which offers do not need."""
    stage = torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8, device=DEVICE)
    return staged_on_device(cache, stage, 2, offers)


def mapped(memory: ShareableMemory) -> Buffer:
    """As a GPU of another process maps it."""
    if not HAS_GPU:
        return memory.bytes
    return gpu_memory.pinned(DEVICE.index or 0, map_to_read(memory.file, memory.num_bytes), is_read_only=True)


@asynccontextmanager
async def pair_of(
    *, layer_groups: int = 1, num_blocks: int = 9, gpus: Sequence[str] = (GPU,), stage_blocks: int = 0
) -> AsyncIterator[Pair]:
    """`gpus`: those that the decode worker reads. `stage_blocks`: those that memory between the GPUs holds."""
    source, target = cache_of(num_blocks, 1), cache_of(num_blocks, 2)
    offers = [DeviceOffers(source, GPU), DeviceOffers(target, GPU)]
    if stage_blocks:
        stage = StagedOffers(offers[0], SharedMemory(stage_blocks * LAYOUT.block_bytes, is_pinned=True))
        offers[0].staged = stage
    offers[0].compile([*LayerGroups.of(LAYOUT, layer_groups).layers, SPEC.layers])
    offers[1]._compiled = offers[0]._compiled
    sending, receiving = InprocWithOffers("sender"), InprocWithOffers("receiver")
    if stage_blocks:
        receiving.mapped = functools.cache(mapped)
    endpoint = DataEndpoint(
        host=HOST,
        lanes=(),
        local=receiving.local_address,
        gpu=GPU,
        readable_gpus=frozenset(gpus),
        pins_host_memory=True,
    )
    identity = ReceiverIdentity(
        worker_id=WorkerId("d0"),
        epoch=new_epoch(),
        grpc_address="d0:1",
        layout=LAYOUT,
        layer_groups=layer_groups,
        data_endpoint=endpoint,
    )
    async with service_group() as tasks:
        receiver = Receiver(transport=receiving, memory=memory_of(target, offers[1]), identity=identity, tasks=tasks)
        sender = Sender(transport=sending, memory=memory_of(source, offers[0]), layout=LAYOUT)
        yield Pair(source, target, offers, sender, receiver)
        await receiver.close()
        await sending.close()
        await receiving.close()
    if HAS_GPU:
        torch.cuda.synchronize()
    if isinstance(offers[0].staged, StagedOffers):
        assert offers[0].staged.frames.are_free
    for each in offers:
        each._launches._reap()
        assert len(each._launches._free) == device_launches._NUM_SLOTS


async def hand_over(pair: Pair, ticket: Ticket, *ids: int) -> None:
    async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
        for group in range(ticket.layer_groups):
            await transfer.push(blocks(*ids), group=group)
        await transfer.finish([5], pair.receiver.commit)


@pytest.mark.parametrize("layer_groups", [1, 2, 3])
async def test_blocks_are_copied_from_cache_to_cache(layer_groups: int) -> None:
    async with pair_of(layer_groups=layer_groups) as pair:
        before = pair.target.tensor.cpu()
        ticket = await pair.grant(8, 2, 5)
        assert pair.sender._local_sources(ticket)
        await hand_over(pair, ticket, 1, 7, 3)
        assert torch.equal(pair.target.tensor.cpu()[[8, 2, 5]], pair.source.tensor.cpu()[[1, 7, 3]])
        others = [0, 1, 3, 4, 6, 7]
        assert torch.equal(pair.target.tensor.cpu()[others], before[others])
        assert len(pair.received) == 1


async def test_several_transfers_at_once_do_not_mix() -> None:
    async with pair_of(layer_groups=3, num_blocks=40) as pair:
        tickets = [await pair.grant(*range(3 * each, 3 * each + 3)) for each in range(12)]
        sources = [[39 - each, each, 20] for each in range(12)]
        await asyncio.gather(
            *(hand_over(pair, *each) for each in zip(tickets, *zip(*sources, strict=True), strict=True))
        )
        for each, ids in enumerate(sources):
            assert torch.equal(pair.target.tensor.cpu()[3 * each : 3 * each + 3], pair.source.tensor.cpu()[ids])


async def test_what_is_read_elsewhere_is_refused_by_its_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = DeviceOffers.starts
    monkeypatch.setattr(DeviceOffers, "starts", lambda *args: starts(*args)[::-1].copy())
    async with pair_of() as pair:
        ticket = await pair.grant(0, 1)
        with pytest.raises(DigestMismatch, match="1 of 1 bundles are not what was sent"):
            await hand_over(pair, ticket, 4, 5)
        assert pair.received == []


async def test_starts_between_words_end_the_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = DeviceOffers.starts
    monkeypatch.setattr(DeviceOffers, "starts", lambda *args: starts(*args) + 8)
    async with pair_of() as pair:
        ticket = await pair.grant(0, 1)
        with pytest.raises(TransferError):
            await hand_over(pair, ticket, 4, 5)


STAGED: dict[str, Any] = {"gpus": ["GPU-2"], "stage_blocks": 4}


@pytest.mark.parametrize("layer_groups", [1, 2, 3])
async def test_a_worker_that_cannot_read_the_gpu_copies_blocks_from_host_memory(layer_groups: int) -> None:
    async with pair_of(layer_groups=layer_groups, **STAGED) as pair:
        before = pair.target.tensor.cpu()
        await hand_over(pair, await pair.grant(8, 2, 5), 1, 7, 3)
        assert torch.equal(pair.target.tensor.cpu()[[8, 2, 5]], pair.source.tensor.cpu()[[1, 7, 3]])
        others = [0, 1, 3, 4, 6, 7]
        assert torch.equal(pair.target.tensor.cpu()[others], before[others])
        assert len(pair.received) == 1


async def test_transfers_wait_for_host_memory_that_others_have_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedOffers, "run_bytes", (1, 1))
    async with pair_of(layer_groups=3, num_blocks=40, **STAGED) as pair:
        tickets = [await pair.grant(*range(3 * each, 3 * each + 3)) for each in range(12)]
        sources = [[39 - each, each, 20] for each in range(12)]
        await asyncio.gather(
            *(hand_over(pair, *each) for each in zip(tickets, *zip(*sources, strict=True), strict=True))
        )
        for each, ids in enumerate(sources):
            assert torch.equal(pair.target.tensor.cpu()[3 * each : 3 * each + 3], pair.source.tensor.cpu()[ids])


async def test_a_transfer_that_ends_while_it_waits_for_host_memory_takes_none() -> None:
    async with pair_of(**STAGED) as pair:
        stage, ticket = pair.offers[0].staged, await pair.grant(8, 2)
        assert isinstance(stage, StagedOffers)
        taken = await stage.frames.take(4)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            pushing = asyncio.create_task(transfer.push(blocks(1, 7)))
            while not transfer.waits_for_memory:  # noqa: ASYNC110 - each turn is an event
                await asyncio.sleep(0)
            pair.sender._transport.disconnect(transfer._peer)
            pushing.cancel()
            await asyncio.wait([pushing])
        stage.frames.give_back(taken)
        await hand_over(pair, await pair.grant(5, 6), 1, 7)


async def test_host_memory_of_a_lost_receiver_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    may_copy, pull = asyncio.Event(), DeviceOffers.pull

    async def late(self: DeviceOffers, *args: Any) -> list[bytes]:
        await may_copy.wait()
        return await pull(self, *args)

    async with pair_of(**STAGED) as pair:
        monkeypatch.setattr(DeviceOffers, "pull", late)
        lost = await pair.grant(0, 1, 3, 4)
        with pytest.raises(TransferError):
            async with pair.sender.open(lost, request_id=REQUEST) as transfer:
                await transfer.push(blocks(1, 7, 3, 4))
                pair.sender._transport.disconnect(transfer._peer)
                await transfer.finish([5], pair.receiver.commit)
        may_copy.set()
        await hand_over(pair, await pair.grant(8, 2, 5, 6), 8, 2, 5, 6)
        assert torch.equal(pair.target.tensor.cpu()[[8, 2, 5, 6]], pair.source.tensor.cpu()[[8, 2, 5, 6]])


async def test_blocks_are_sent_where_host_memory_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(self: StagedOffers) -> None:
        raise SetupError("256 MiB of host memory cannot be pinned: no.")

    monkeypatch.setattr(StagedOffers, "open", refused)
    async with pair_of(**STAGED) as pair, pair.sender.open(await pair.grant(8), request_id=REQUEST) as transfer:
        assert transfer._local is None
        assert pair.sender._local_sources(await pair.grant(5)) == []  # For a while.


async def test_a_worker_that_refuses_the_cache_copies_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = InprocWithOffers.connect_locally

    async def refusing(
        self: InprocWithOffers, address: LocalAddress, memory: ShareableMemory | None = None
    ) -> LocalPeer:
        assert memory is not None
        if not memory.is_pinned:
            raise PeerLost("cuMemImportFromShareableHandle: CUDA_ERROR_INVALID_DEVICE (101)")
        return await connect(self, address, memory)

    monkeypatch.setattr(InprocWithOffers, "connect_locally", refusing)
    async with pair_of(stage_blocks=4) as pair:
        for _ in range(2):
            await hand_over(pair, await pair.grant(8, 2, 5), 1, 7, 3)
        assert torch.equal(pair.target.tensor.cpu()[[8, 2, 5]], pair.source.tensor.cpu()[[1, 7, 3]])


async def test_a_transfer_whose_receiver_does_not_copy_waits_for_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would renew its lease otherwise, and keep what others wait for."""
    may_copy, pull = asyncio.Event(), DeviceOffers.pull

    async def late(self: DeviceOffers, *args: Any) -> list[bytes]:
        await may_copy.wait()
        return await pull(self, *args)

    monkeypatch.setattr(DeviceOffers, "pull", late)
    monkeypatch.setattr(StagedOffers, "run_bytes", (1, 1))
    async with pair_of(gpus=["GPU-2"], stage_blocks=2) as pair:
        ticket = await pair.grant(0, 1, 3, 4)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            pushing = asyncio.create_task(transfer.push(blocks(1, 7, 3, 4)))
            while not transfer._is_waiting or transfer.quiet:  # noqa: ASYNC110 - each turn is an event
                await asyncio.sleep(0)
            assert not transfer.waits_for_memory
            may_copy.set()
            await pushing
            await transfer.finish([5], pair.receiver.commit)
        assert torch.equal(pair.target.tensor.cpu()[[0, 1, 3, 4]], pair.source.tensor.cpu()[[1, 7, 3, 4]])


async def test_frames_are_lent_in_the_order_of_the_requests() -> None:
    frames = Frames(4)
    first, second = await frames.take(1), await frames.take(2)
    large, small = asyncio.create_task(frames.take(3)), asyncio.create_task(frames.take(1))
    await asyncio.sleep(0)
    assert not small.done()  # One is free, but the other has asked before.
    large.cancel()
    assert len(await small) == 1
    last = asyncio.create_task(frames.take(4))
    await asyncio.sleep(0)
    for each in (first, second, await small):
        assert not last.done()
        frames.give_back(each)
    assert sorted(await last) == [0, 1, 2, 3]


async def test_frames_that_were_lent_to_a_cancelled_caller_are_free() -> None:
    frames = Frames(2)
    taken = await frames.take(2)
    waiting = asyncio.create_task(frames.take(2))
    await asyncio.sleep(0)
    frames.give_back(taken)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert frames.are_free


async def test_a_worker_that_cannot_read_the_gpu_is_sent_its_blocks() -> None:
    async with pair_of(gpus=["GPU-2"]) as pair:
        ticket = await pair.grant(8, 2)
        assert pair.sender._local_sources(ticket) == []
        endpoint = ticket.data_endpoint
        assert endpoint is not None
        on_host = replace(ticket, data_endpoint=endpoint.with_host_memory())
        assert pair.sender._local_sources(on_host) == []


async def test_more_launches_than_buffers_wait_for_the_first_ones() -> None:
    async with pair_of() as pair:
        memory = pair.offers[0]
        found = [await memory.digest([blocks(each % 9)], SPEC) for each in range(3 * device_launches._NUM_SLOTS)]
        digests = [await each.found() for each in found]
        assert digests[:9] == digests[9:18]
        assert len({digest for [digest] in digests[:9]}) == 9


async def test_a_gpu_without_memory_ends_the_transfer_and_loses_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    async with pair_of() as pair:
        memory = pair.offers[0]
        with monkeypatch.context() as patched:
            patched.setattr("kernels.triton.blocks.digest_keys", full)
            for _ in range(2 * device_launches._NUM_SLOTS):
                with pytest.raises(TransferError, match="no memory left"):
                    await memory.digest([blocks(1)], SPEC)
        await (await memory.digest([blocks(1)], SPEC)).found()


async def test_large_runs_get_larger_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_launches, "_SLOT_SUMS", 4)
    async with pair_of() as pair:
        await hand_over(pair, await pair.grant(8, 2, 5), 1, 7, 3)
        assert torch.equal(pair.target.tensor.cpu()[[8, 2, 5]], pair.source.tensor.cpu()[[1, 7, 3]])


async def test_an_abort_waits_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, may_end = asyncio.Event(), asyncio.Event()
    wait_for = device_launches.DeviceLaunches.wait_for

    async def slow(self: device_launches.DeviceLaunches, launch: device_launches.Launch) -> list[bytes]:
        waits.set()
        await may_end.wait()
        return await wait_for(self, launch)

    async with pair_of() as pair:
        ticket = await pair.grant(8, 2)
        monkeypatch.setattr(device_launches.DeviceLaunches, "wait_for", slow)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(1, 7))
            await waits.wait()
            abort = asyncio.create_task(pair.receiver.abort(ticket.transfer_id))
            await asyncio.sleep(0)
            assert not abort.done()
            assert not transfer.quiet
            may_end.set()
            await abort
            assert transfer.quiet


async def test_kernels_of_other_layer_groups_are_compiled_on_a_thread_and_touch_no_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled, threads = DeviceOffers.compile, list[str]()

    def noted(self: DeviceOffers, messages: Sequence[slice]) -> None:
        threads.append(threading.current_thread().name)
        compiled(self, messages)

    async with pair_of() as pair:
        memory, before = pair.offers[0], pair.source.tensor.cpu()
        monkeypatch.setattr(DeviceOffers, "compile", noted)
        for layers in (slice(0, 3), slice(0, 2), slice(1, 3), slice(1, 2), slice(1, 3)):
            await (await memory.digest([blocks(1)], replace(SPEC, layers=layers))).found()
        assert len(threads) == 2
        assert threading.current_thread().name not in threads
        assert torch.equal(pair.source.tensor.cpu(), before)


async def test_host_memory_is_refused_by_a_worker_on_a_gpu() -> None:
    if DEVICE.type == "cpu":
        pytest.skip("blocks are in host memory here")
    async with pair_of() as pair:
        offered = np.zeros(9 * LAYOUT.block_bytes, np.uint8)
        with pytest.raises(TransferError, match="Host memory was offered"):
            await pair.offers[0].pull(offered, np.zeros(1, np.int64), [blocks(1)], SPEC)


async def test_a_lost_gpu_fails_all_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        pytest.skip("nothing is waited for here")

    async def lost(self: device_launches.EventWatch, event: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    async with pair_of() as pair:
        memory = pair.offers[0]
        stream = memory._launches._stream
        with monkeypatch.context() as patched:
            patched.setattr(device_launches.EventWatch, "occurred", lost)
            with torch.cuda.stream(stream):
                keep_busy()
            found = [await memory.digest([blocks(1)], SPEC) for _ in range(device_launches._NUM_SLOTS)]
            waiting = [asyncio.create_task(each.found()) for each in found]
            taking = asyncio.create_task(memory.digest([blocks(1)], SPEC))
            results = await asyncio.gather(*waiting, taking, return_exceptions=True)
            assert all(isinstance(each, RuntimeError) for each in results)
            with pytest.raises(RuntimeError, match="illegal memory access"):  # Nothing waits for a slot in vain.
                await memory.digest([blocks(1)], SPEC)
        torch.cuda.synchronize()
        memory._launches._free += [device_launches.Slot(DEVICE) for _ in range(device_launches._NUM_SLOTS)]


def test_keys_are_shared_by_threads() -> None:
    keys, errors = DigestKeys(DEVICE, 2), list[BaseException]()

    def use(first: int) -> None:
        try:
            for number in range(2000):
                keys.of(bytes([first + number % 3] * 16))
        except KeyError as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=use, args=(first,)) for first in (0, 1, 2, 3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert errors == []


class TestOnHardware:
    """What only a device with queues shows."""

    pytestmark = gpu_only

    async def test_digests_wait_for_their_event_and_for_no_later_launch(self) -> None:
        cache = cache_of(2, 1)
        memory = DeviceOffers(cache, GPU)
        memory.compile([slice(0, 1)])
        keep_busy()
        cache.tensor[1, 0] = 5
        event = cache.record_event(1)
        keep_busy()
        cache.tensor[1, 0] = 6
        later = torch.cuda.current_stream().record_event()
        spec = replace(SPEC, layers=slice(0, 1), after=event)
        await memory.computed(spec)
        [first] = await (await memory.digest([blocks(1)], spec)).found()
        assert not later.query()
        await memory.computed(replace(spec, after=later))
        [second] = await (await memory.digest([blocks(1)], spec)).found()
        assert first != second

    @pytest.mark.skipif(not SIMULATED, reason="only the simulated GPU counts")
    async def test_a_layer_group_costs_a_launch_a_side_no_allocation_and_a_wait_a_side(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from tests.support.simulated_gpu.streams import gpu

        loop, hops = asyncio.get_running_loop(), list[Callable[..., object]]()
        in_executor = loop.run_in_executor

        def counted(executor: Any, call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
            hops.append(call)
            return in_executor(executor, call, *args)

        async with pair_of(layer_groups=3) as pair:
            ticket = await pair.grant(8, 2, 5)
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await self.push(pair, transfer, 0)  # Keys are stretched once for a transfer.
                monkeypatch.setattr(loop, "run_in_executor", counted)
                gpu().counts.clear()
                await self.push(pair, transfer, 1)
                counts = dict(gpu().counts)
                monkeypatch.undo()
                await self.push(pair, transfer, 2)
                await transfer.finish([5], pair.receiver.commit)
        assert counts["launches"] == 2
        assert counts.get("allocations", 0) == counts.get("pinned allocations", 0) == 0
        # Each side's thread waits for one event: that of the step, and that of the copy.
        assert counts["waits"] == len(hops) == 2

    async def push(self, pair: Pair, transfer: OutgoingTransfer, group: int) -> None:
        """One layer group, whose step is still running, until it has arrived."""
        keep_busy()
        event = pair.source.record_event(group + 1)
        with torch.cuda.stream(pair.offers[1]._launches._stream):
            keep_busy()
        await transfer.push(blocks(1, 7, 3), group=group, after=event)
        while not transfer.quiet:
            await transfer._change()
