"""Blocks stop over in a bounded stage: nothing is lost in it, nobody starves, and it is empty in the end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.handover.digest import HOST_DIGEST
from kvtransfer.handover.memory import BlockMemory, Bundle, MessageSpec
from kvtransfer.handover.staging import StagedMemory
from kvtransfer.transport import Buffer, Operation, Peer
from pdserve.base.device_event import DeviceEvent
from pdserve.base.errors import DigestMismatch, NoFreeBlocks, TransferError, TransferTimeout
from tests.support.handover import LAYOUT, REQUEST, Memory, Pair, blocks, in_place, push_all, worker_pair


class Copies:
    """Implements `BlockCopies` for the blocks of a `Memory`; a copy takes its time."""

    def __init__(self, memory: Memory, stage: Buffer) -> None:
        self._blocks = memory.blocks
        self._stage = stage
        self._layer_bytes = LAYOUT.block_bytes // LAYOUT.num_layers
        self.fails = False
        #: Set while copies may end.
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        #: Blocks of each copy that was begun.
        self.begun: list[list[int]] = []
        #: And the layers, and for those that read, the moments after which they did.
        self.layers: list[tuple[int, int]] = []
        self.moments: list[DeviceEvent | None] = []
        self.has_begun = asyncio.Event()

    digest = HOST_DIGEST

    async def read(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        await self._copy(bundles, spec.layers)
        self.moments.append(spec.after)
        digests = []
        for there, here in self._places(bundles, slots, spec.layers):
            there[:] = here
            digests.append(spec.digest(there.reshape(-1)))
        return digests

    async def write(self, bundles: Sequence[Bundle], slots: Sequence[int], spec: MessageSpec) -> list[bytes]:
        await self._copy(bundles, spec.layers)
        digests = []
        for bundle, (there, _) in zip(bundles, self._places(bundles, slots, spec.layers), strict=True):
            self._blocks[list(bundle), self._span(spec.layers)] = there
            digests.append(spec.digest(there.reshape(-1)))
        return digests

    def _places(
        self, bundles: Sequence[Bundle], slots: Sequence[int], layers: slice
    ) -> Iterator[tuple[Buffer, Buffer]]:
        """Of each bundle its message in the stage, and what its blocks have, a row for each block."""
        span = self._span(layers)
        for bundle, slot in zip(bundles, slots, strict=True):
            first = slot * LAYOUT.block_bytes
            message = self._stage[first + len(bundle) * span.start : first + len(bundle) * span.stop]
            yield message.reshape(len(bundle), -1), self._blocks[list(bundle), span]

    def _span(self, layers: slice) -> slice:
        return slice(layers.start * self._layer_bytes, layers.stop * self._layer_bytes)

    async def _copy(self, bundles: Sequence[Bundle], layers: slice) -> None:
        self.begun.append([block for bundle in bundles for block in bundle])
        self.layers.append((layers.start, layers.stop))
        self.has_begun.set()
        await asyncio.sleep(0)
        await self.goes_on.wait()
        if self.fails:
            raise TransferError("a rank is gone")


def staged(memory: Memory, num_slots: int = 4) -> StagedMemory:
    return staged_with_copies(memory, num_slots)[0]


def staged_with_copies(memory: Memory, num_slots: int, bundle_blocks: int = 1) -> tuple[StagedMemory, Copies]:
    stage = np.zeros(num_slots * LAYOUT.block_bytes, np.uint8)
    copies = Copies(memory, stage)
    return StagedMemory(copies, stage, LAYOUT.block_bytes, bundle_blocks), copies


def lone(*ids: int) -> list[Bundle]:
    """A bundle of each."""
    return [[block] for block in blocks(*ids)]


class Stages:
    """Makes the stages of a pair, the sender's first, and keeps them."""

    def __init__(self, *num_slots: int, bundle_blocks: int = 1) -> None:
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


async def every_message() -> None:
    """Returns when nothing is on its way any more: a message within a process takes a few turns of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def hand_over(pair: Pair, sources: list[int], targets: list[int]) -> None:
    ticket = await pair.grant(targets)
    async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
        await transfer.push(blocks(*sources))
        await transfer.finish([5], pair.receiver.commit)


async def test_more_blocks_than_the_senders_stage_holds_go_through_it() -> None:
    stages = Stages(2, 8)
    async with worker_pair(stage=stages) as pair:
        await hand_over(pair, [0, 1, 2, 3, 4, 5, 6], [8, 9, 10, 11, 12, 13, 14])
        assert np.array_equal(pair.target.blocks[8:15], pair.source.blocks[:7])
        assert len(pair.received) == 1
        assert stages.are_empty


async def test_a_transfer_waits_for_the_stage_until_another_has_received() -> None:
    stages = Stages(4, 4)
    async with worker_pair(stage=stages) as pair:
        first = await pair.grant([0, 1, 2])
        second = asyncio.create_task(pair.grant([3, 4]))
        third = asyncio.create_task(pair.grant([5]))
        await asyncio.sleep(0)
        # There would be room for the third, but it came later.
        assert not second.done()
        assert not third.done()
        async with pair.sender.open(first, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1, 2))
            await transfer.finish([5], pair.receiver.commit)
        await asyncio.gather(second, third)
        for ticket in (second.result(), third.result()):
            await pair.receiver.abort(ticket.transfer_id)
        assert stages.are_empty


async def test_who_stops_waiting_leaves_the_turn_to_the_next() -> None:
    stage = staged(Memory(8, 1))
    held = await stage.lend(lone(0, 1, 2))
    large = asyncio.create_task(stage.lend(lone(3, 4)))
    small = asyncio.create_task(stage.lend(lone(5)))
    await asyncio.sleep(0)
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    for buffer in [*held, *await small]:
        stage.give_back(buffer)
    assert stage.num_free == 4


async def test_who_is_cancelled_as_its_turn_comes_gives_it_back() -> None:
    stage = staged(Memory(8, 1))
    held = await stage.lend(lone(0, 1, 2, 3))
    waiting = asyncio.create_task(stage.lend(lone(4)))
    await asyncio.sleep(0)
    for buffer in held:
        stage.give_back(buffer)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert stage.num_free == 4


async def test_a_waiter_whom_room_and_cancellation_reach_together_is_cancelled() -> None:
    stage = staged(Memory(8, 1))
    held = await stage.lend(lone(0, 1, 2, 3))
    waiting = asyncio.create_task(stage.lend(lone(4)))
    await asyncio.sleep(0)
    waiting.cancel()
    for buffer in held:
        stage.give_back(buffer)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert stage.num_free == 4


async def test_what_can_never_fit_is_refused_with_what_to_do() -> None:
    async with worker_pair(stage=Stages(4, 4)) as pair:
        with pytest.raises(NoFreeBlocks, match=r"5 bundles of .* room for 4 of 1. Raise --staging-memory"):
            await pair.grant([0, 1, 2, 3, 4])
        await hand_over(pair, [0], [1])


async def test_a_transfer_that_is_given_up_leaves_the_stage_empty() -> None:
    stages = Stages(4, 4)
    async with worker_pair(stage=stages) as pair:
        ticket = await pair.grant([0, 1, 2, 3])
        with pytest.raises(RuntimeError, match="the prompt was lost"):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await transfer.push(blocks(0, 1))
                raise RuntimeError("the prompt was lost")
        await pair.receiver.abort(ticket.transfer_id)
        assert stages.are_empty
        # And the slots are as good as new.
        await hand_over(pair, [4, 5, 6, 7], [4, 5, 6, 7])
        assert np.array_equal(pair.target.blocks[4:8], pair.source.blocks[4:8])


async def test_an_expired_lease_empties_the_stage() -> None:
    stages = Stages(4, 4)
    async with worker_pair(stage=stages) as pair:
        expired = asyncio.get_running_loop().create_future()
        reservation = replace(pair.reservation([0, 1], lease_s=0.05), on_expired=expired.set_result)
        await pair.receiver.grant(reservation, attempt=1)
        assert stages.made[0].num_free == 2
        assert isinstance(await expired, TransferTimeout)
        assert stages.are_empty


async def test_each_buffer_is_lent_to_one_at_a_time() -> None:
    stage = staged(Memory(8, 1))
    lent = await stage.lend(lone(0, 1))
    assert not np.shares_memory(lent[0], lent[1])
    stage.give_back(lent[0])
    with pytest.raises(KeyError):
        stage.give_back(lent[0])


async def test_blocks_that_arrive_during_a_copy_are_stored_together() -> None:
    stages = Stages(8, 8)
    async with worker_pair(stage=stages) as pair:
        stages.copies[0].goes_on.clear()
        ticket = await pair.grant([8, 9, 10, 11])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0))
            await stages.copies[0].has_begun.wait()
            await transfer.push(blocks(1, 2, 3))
            await every_message()
            stages.copies[0].goes_on.set()
            await transfer.finish([5], pair.receiver.commit)
        assert stages.copies[0].begun == [[8], [9, 10, 11]]
        assert np.array_equal(pair.target.blocks[8:12], pair.source.blocks[:4])


async def test_a_copy_that_fails_refuses_the_commit_and_the_stage_is_empty_in_the_end() -> None:
    stages = Stages(4, 4)
    async with worker_pair(stage=stages) as pair:
        stages.copies[0].fails = True
        ticket = await pair.grant([0, 1])
        with pytest.raises(TransferError, match="a rank is gone"):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await transfer.push(blocks(0, 1))
                await transfer.finish([5], pair.receiver.commit)
        await pair.receiver.abort(ticket.transfer_id)
        assert pair.received == []
        assert stages.are_empty


async def test_blocks_that_cannot_be_read_end_the_transfer_and_leave_the_stage_empty() -> None:
    stages = Stages(4, 4)
    async with worker_pair(stage=stages) as pair:
        stages.copies[1].fails = True
        ticket = await pair.grant([0, 1])
        with pytest.raises(TransferError, match="a rank is gone"):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await transfer.push(blocks(0, 1))
        await pair.receiver.abort(ticket.transfer_id)
        assert stages.are_empty


async def test_an_abort_returns_when_nothing_is_stored_any_more() -> None:
    stages = Stages(4, 4)
    async with worker_pair(stage=stages) as pair:
        stages.copies[0].goes_on.clear()
        ticket = await pair.grant([8, 9])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1))
            await stages.copies[0].has_begun.wait()
            abort = asyncio.create_task(pair.receiver.abort(ticket.transfer_id))
            await every_message()
            assert not abort.done()
            assert stages.made[0].num_free == 2
            stages.copies[0].goes_on.set()
            await abort
            assert stages.made[0].num_free == 4


@pytest.mark.parametrize("bundle_blocks", [2, 3, 4, 16])
@pytest.mark.parametrize("layer_groups", [1, 3])
@pytest.mark.parametrize("is_sender_staged", [True, False])
async def test_bundles_arrive_block_by_block_the_last_of_them_cut_short(
    bundle_blocks: int, layer_groups: int, is_sender_staged: bool
) -> None:
    stages = Stages(16, 16, bundle_blocks=bundle_blocks)

    def stage(memory: Memory) -> BlockMemory:
        return stages(memory) if is_sender_staged or not stages.made else in_place(memory)

    async with worker_pair(stage=stage, layer_groups=layer_groups) as pair:
        ticket = await pair.grant([9, 3, 12, 1, 15])
        assert ticket.bundle_blocks == bundle_blocks
        before = pair.target.blocks.copy()
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            whole = 5 // bundle_blocks * bundle_blocks
            await push_all(transfer, *[4, 0, 2, 7, 5][:whole])
            await push_all(transfer, *[4, 0, 2, 7, 5][whole:])
            await transfer.finish([5], pair.receiver.commit)
            assert transfer.stats.sent_blocks == 5
        assert np.array_equal(pair.target.blocks[[9, 3, 12, 1, 15]], pair.source.blocks[[4, 0, 2, 7, 5]])
        others = [block for block in range(16) if block not in (9, 3, 12, 1, 15)]
        assert np.array_equal(pair.target.blocks[others], before[others])
        assert stages.are_empty


async def test_a_wrong_byte_in_a_bundle_is_found() -> None:
    stages = Stages(16, 16, bundle_blocks=4)
    async with worker_pair(stage=stages) as pair:
        post_send = pair.sending.post_send

        def corrupting(peer: Peer, tag: int, buffer: Buffer) -> Operation:
            buffer = buffer.copy()
            buffer[LAYOUT.block_bytes + 3] ^= 1
            return post_send(peer, tag, buffer)

        pair.sending.post_send = corrupting  # type: ignore[method-assign]
        ticket = await pair.grant([0, 1, 2, 3])
        with pytest.raises(DigestMismatch, match="1 of 1 bundles are not what was sent"):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await transfer.push(blocks(0, 1, 2, 3))
                await transfer.finish([5], pair.receiver.commit)
        await pair.receiver.abort(ticket.transfer_id)
        assert stages.are_empty


async def test_a_bundle_takes_a_frame_however_short_it_is() -> None:
    stage, _ = staged_with_copies(Memory(8, 1), 11, 4)
    assert stage.max_blocks == stage.num_free == 8  # Two frames; three slots are too few for another.
    short, whole = await stage.lend([blocks(0), blocks(1, 2, 3, 4)])
    assert (short.nbytes, whole.nbytes) == (LAYOUT.block_bytes, 4 * LAYOUT.block_bytes)
    assert not np.shares_memory(short, whole)
    waiting = asyncio.create_task(stage.lend([blocks(5)]))
    await asyncio.sleep(0)
    assert not waiting.done()
    stage.give_back(short)
    [third] = await waiting
    for buffer in (third, whole):
        stage.give_back(buffer)
    assert stage.num_free == 8


async def test_bundles_that_no_frame_holds_are_refused() -> None:
    stage, _ = staged_with_copies(Memory(8, 1), 8, 2)
    with pytest.raises(NoFreeBlocks, match=r"1 bundles of up to 3 KV blocks .* room for 4 of 2"):
        await stage.lend([blocks(0, 1, 2)])


@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), max_size=12), st.randoms(use_true_random=False))
def test_who_counts_whole_bundles_never_waits(transfers: list[list[int]], draw: random.Random) -> None:
    """As the decode scheduler does; in whatever order room is given back."""
    stage, _ = staged_with_copies(Memory(8, 1), 24, 3)

    async def run() -> None:
        lent: list[list[Buffer]] = []
        for sizes in transfers:
            while 3 * (sum(map(len, lent)) + len(sizes)) > stage.max_blocks:
                for buffer in lent.pop(draw.randrange(len(lent))):
                    stage.give_back(buffer)
            taking = asyncio.ensure_future(stage.lend([blocks(0) * size for size in sizes]))
            await asyncio.sleep(0)
            assert taking.done()
            lent.append(taking.result())
        for buffers in lent:
            for buffer in buffers:
                stage.give_back(buffer)
        assert stage.num_free == stage.max_blocks

    asyncio.run(run())


async def test_a_peer_that_takes_nothing_leaves_room_for_transfers_to_others() -> None:
    stages = Stages(8, 32)
    async with worker_pair(stage=stages) as pair:
        stuck, fine = await pair.grant([*range(8)]), await pair.grant([8, 9])
        nobody = replace(stuck, tag_base=stuck.tag_base ^ (1 << 40))
        async with (
            pair.sender.open(nobody, request_id=REQUEST) as blocked,
            pair.sender.open(fine, request_id=REQUEST) as transfer,
        ):
            pushing = asyncio.create_task(blocked.push(blocks(*range(8))))
            await every_message()
            assert not pushing.done()
            assert stages.made[1].num_free == 5  # Two on the wire, and one ready.
            await transfer.push(blocks(0, 1))
            await transfer.finish([5], pair.receiver.commit)
            pushing.cancel()
            await asyncio.wait([pushing])
        await pair.receiver.abort(stuck.transfer_id)
        assert stages.are_empty


async def test_a_lease_that_ends_while_memory_is_waited_for_ends_the_push() -> None:
    stages = Stages(2, 8)
    async with worker_pair(stage=stages) as pair:
        held = await stages.made[1].lend(lone(0, 1))
        ticket = await pair.grant([0], lease_s=0.1)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            with pytest.raises(TransferTimeout):
                async with asyncio.timeout(10):
                    await transfer.push(blocks(0))
            assert not transfer.waits_for_memory
        for buffer in held:
            stages.made[1].give_back(buffer)
        assert stages.made[1].num_free == 2


async def test_who_waits_for_memory_says_so_and_goes_on() -> None:
    stages = Stages(2, 8)
    async with worker_pair(stage=stages) as pair:
        held = await stages.made[1].lend(lone(0, 1))
        ticket = await pair.grant([0])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            pushing = asyncio.create_task(transfer.push(blocks(0)))
            await every_message()
            assert transfer.waits_for_memory
            for buffer in held:
                stages.made[1].give_back(buffer)
            await pushing
            await transfer.finish([5], pair.receiver.commit)
        assert stages.are_empty
