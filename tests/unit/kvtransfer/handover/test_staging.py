"""Blocks pass through a bounded stage: nothing is lost, no transfer starves, and it is empty in the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.handover.memory import BlockMemory, Bundle
from kvtransfer.transport import Buffer, Operation, Peer
from pdserve.base.errors import DigestMismatch, NoFreeBlocks, PeerLost, TransferError, TransferTimeout
from tests.support.deadline import DEADLINE_S
from tests.support.handover import (
    LAYOUT,
    REQUEST,
    Memory,
    Pair,
    Stages,
    blocks,
    in_place,
    not_received,
    push_all,
    staged,
    staged_with_copies,
    until_idle,
    worker_pair,
)

pytestmark = pytest.mark.virtual_time


def single_blocks(*ids: int) -> list[Bundle]:
    """A bundle of one block for each id."""
    return [[block] for block in blocks(*ids)]


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


async def test_messages_wait_for_the_receivers_stage_in_the_order_of_their_arrival() -> None:
    stages = Stages(8, 1)
    async with worker_pair(stage=stages) as pair:
        stages.copies[0].may_end.clear()
        first, second = await pair.grant([8, 9, 10]), await pair.grant([11, 12])
        async with (
            pair.sender.open(first, request_id=REQUEST) as one,
            pair.sender.open(second, request_id=REQUEST) as other,
        ):
            await one.push(blocks(0, 1))
            await other.push(blocks(3, 4))
            await one.push(blocks(2))
            await stages.copies[0].has_started.wait()
            stages.copies[0].may_end.set()
            await asyncio.gather(
                one.finish([5], pair.receiver.commit),
                other.finish([5], pair.receiver.commit),
            )
        # A transfer's messages wait one behind the other, and transfers in turn.
        assert stages.copies[0].started == [[8], [9], [11], [10], [12]]
        assert np.array_equal(pair.target.blocks[8:13], pair.source.blocks[:5])
        assert stages.are_empty


async def test_an_abort_withdraws_messages_that_wait_for_the_stage() -> None:
    stages = Stages(8, 2)
    async with worker_pair(stage=stages) as pair:
        held = await stages.made[0].lend(single_blocks(0, 1))
        ticket = await pair.grant([8, 9])
        before = pair.target.blocks.copy()
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1))
            await until_idle()
            assert not transfer.quiet
            await pair.receiver.abort(ticket.transfer_id)
            assert transfer.quiet  # Nobody waits for what nobody takes.
        for buffer in held:
            stages.made[0].give_back(buffer)
        await until_idle()
        assert stages.are_empty
        assert np.array_equal(pair.target.blocks, before)


async def test_a_transport_that_closes_loses_messages_that_wait_for_the_stage() -> None:
    stages = Stages(8, 2)
    async with worker_pair(stage=stages) as pair:
        held = await stages.made[0].lend(single_blocks(0, 1))
        ticket = await pair.grant([8, 9])
        with pytest.raises(PeerLost):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await transfer.push(blocks(0, 1))
                committing = asyncio.create_task(transfer.finish([5], pair.receiver.commit))
                await until_idle()
                await pair.receiving.close()
                for buffer in held:
                    stages.made[0].give_back(buffer)
                await committing
        await pair.receiver.abort(ticket.transfer_id)
        assert stages.are_empty


async def test_a_cancelled_waiter_lets_the_next_one_through() -> None:
    stage = staged(Memory(8, 1))
    held = await stage.lend(single_blocks(0, 1, 2))
    large = asyncio.create_task(stage.lend(single_blocks(3, 4)))
    small = asyncio.create_task(stage.lend(single_blocks(5)))
    await until_idle()
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    for buffer in [*held, *await small]:
        stage.give_back(buffer)
    assert stage.num_free == 4


async def test_a_waiter_cancelled_after_it_was_served_gives_the_memory_back() -> None:
    stage = staged(Memory(8, 1))
    held = await stage.lend(single_blocks(0, 1, 2, 3))
    waiting = asyncio.create_task(stage.lend(single_blocks(4)))
    await until_idle()
    for buffer in held:
        stage.give_back(buffer)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert stage.num_free == 4


async def test_a_waiter_cancelled_just_before_memory_is_freed_is_cancelled() -> None:
    stage = staged(Memory(8, 1))
    held = await stage.lend(single_blocks(0, 1, 2, 3))
    waiting = asyncio.create_task(stage.lend(single_blocks(4)))
    await until_idle()
    waiting.cancel()
    for buffer in held:
        stage.give_back(buffer)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert stage.num_free == 4


async def test_a_transfer_larger_than_both_stages_goes_through_them() -> None:
    stages = Stages(4, 4)
    async with worker_pair(stage=stages) as pair:
        await hand_over(pair, [*range(8)], [*range(8, 16)])
        assert np.array_equal(pair.target.blocks[8:], pair.source.blocks[:8])
        assert stages.are_empty


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
        # The slots can be used again.
        await hand_over(pair, [4, 5, 6, 7], [4, 5, 6, 7])
        assert np.array_equal(pair.target.blocks[4:8], pair.source.blocks[4:8])


async def test_a_lease_that_ends_while_messages_wait_for_the_stage_withdraws_them() -> None:
    stages = Stages(8, 4)
    async with worker_pair(stage=stages) as pair:
        held = await stages.made[0].lend(single_blocks(0, 1, 2, 3))
        expired = asyncio.get_running_loop().create_future()
        reservation = replace(pair.reservation([0, 1], lease_s=0.05), on_expired=expired.set_result)
        ticket = await pair.receiver.grant(reservation, attempt=1)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1))
            assert isinstance(await expired, TransferTimeout)
        for buffer in held:
            stages.made[0].give_back(buffer)
        await until_idle()
        assert stages.are_empty


async def test_a_buffer_is_lent_once_at_a_time() -> None:
    stage = staged(Memory(8, 1))
    lent = await stage.lend(single_blocks(0, 1))
    assert not np.shares_memory(lent[0], lent[1])
    stage.give_back(lent[0])
    with pytest.raises(KeyError):
        stage.give_back(lent[0])


async def test_blocks_that_arrive_during_a_copy_are_stored_together() -> None:
    stages = Stages(8, 8)
    async with worker_pair(stage=stages) as pair:
        stages.copies[0].may_end.clear()
        ticket = await pair.grant([8, 9, 10, 11])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0))
            await stages.copies[0].has_started.wait()
            await transfer.push(blocks(1, 2, 3))
            await until_idle()
            stages.copies[0].may_end.set()
            await transfer.finish([5], pair.receiver.commit)
        assert stages.copies[0].started == [[8], [9, 10, 11]]
        assert np.array_equal(pair.target.blocks[8:12], pair.source.blocks[:4])


async def test_a_failed_copy_refuses_the_commit_and_leaves_the_stage_empty() -> None:
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


async def test_a_failed_read_ends_the_transfer_and_leaves_the_stage_empty() -> None:
    stages = Stages(4, 4)
    async with worker_pair(stage=stages) as pair:
        stages.copies[1].fails = True
        ticket = await pair.grant([0, 1])
        with pytest.raises(TransferError, match="a rank is gone"):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await transfer.push(blocks(0, 1))
        await pair.receiver.abort(ticket.transfer_id)
        assert stages.are_empty


async def test_an_abort_waits_for_a_copy_under_way() -> None:
    stages = Stages(4, 4)
    async with worker_pair(stage=stages) as pair:
        stages.copies[0].may_end.clear()
        ticket = await pair.grant([8, 9])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1))
            await stages.copies[0].has_started.wait()
            abort = asyncio.create_task(pair.receiver.abort(ticket.transfer_id))
            await until_idle()
            assert not abort.done()
            assert stages.made[0].num_free == 2
            stages.copies[0].may_end.set()
            await abort
            assert stages.made[0].num_free == 4


@pytest.mark.parametrize("bundle_blocks", [2, 3, 4, 16])
@pytest.mark.parametrize("layer_groups", [1, 3])
@pytest.mark.parametrize("is_sender_staged", [True, False])
async def test_bundles_arrive_although_the_last_one_is_shorter(
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


@pytest.mark.parametrize(("bundle_blocks", "layer_groups", "num_messages"), [(8, 1, 1), (4, 1, 2), (4, 2, 4)])
async def test_a_transfer_takes_a_message_for_each_bundle_and_layer_group(
    bundle_blocks: int, layer_groups: int, num_messages: int
) -> None:
    """Not one for each block, layer or token."""
    stages = Stages(16, 16, bundle_blocks=bundle_blocks)
    async with worker_pair(stage=stages, layer_groups=layer_groups) as pair:
        post_send, sizes = pair.sending.post_send, list[int]()

        def counting(peer: Peer, tag: int, buffer: Buffer) -> Operation:
            sizes.append(len(buffer))
            return post_send(peer, tag, buffer)

        pair.sending.post_send = counting  # type: ignore[method-assign]
        ticket = await pair.grant([*range(8)])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await push_all(transfer, *range(8))
            await transfer.finish([5], pair.receiver.commit)
        assert len(sizes) == num_messages
        assert sum(sizes) == 8 * LAYOUT.block_bytes


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
    assert stage.max_blocks == stage.num_free == 8  # Two frames: the other three slots are no whole frame.
    short, whole = await stage.lend([blocks(0), blocks(1, 2, 3, 4)])
    assert (short.nbytes, whole.nbytes) == (LAYOUT.block_bytes, 4 * LAYOUT.block_bytes)
    assert not np.shares_memory(short, whole)
    waiting = asyncio.create_task(stage.lend([blocks(5)]))
    await until_idle()
    assert not waiting.done()
    stage.give_back(short)
    [third] = await waiting
    for buffer in (third, whole):
        stage.give_back(buffer)
    assert stage.num_free == 8


async def test_bundles_larger_than_a_frame_are_refused() -> None:
    stage, _ = staged_with_copies(Memory(8, 1), 8, 2)
    with pytest.raises(NoFreeBlocks, match=r"1 bundles of up to 3 KV blocks .* holds 4 bundles of 2"):
        await stage.lend([blocks(0, 1, 2)])


async def test_a_peer_that_reads_nothing_leaves_memory_for_transfers_to_others() -> None:
    stages = Stages(8, 32)
    async with worker_pair(stage=stages) as pair:
        stuck, fine = await pair.grant([*range(8)]), await pair.grant([8, 9])
        async with (
            pair.sender.open(not_received(stuck), request_id=REQUEST) as blocked,
            pair.sender.open(fine, request_id=REQUEST) as transfer,
        ):
            pushing = asyncio.create_task(blocked.push(blocks(*range(8))))
            await until_idle()
            assert not pushing.done()
            assert stages.made[1].num_free == 5  # Two are on the wire and one is ready.
            await transfer.push(blocks(0, 1))
            await transfer.finish([5], pair.receiver.commit)
            pushing.cancel()
            await asyncio.wait([pushing])
        await pair.receiver.abort(stuck.transfer_id)
        assert stages.are_empty


async def test_a_lease_that_ends_while_a_push_waits_for_memory_ends_the_push() -> None:
    stages = Stages(2, 8)
    async with worker_pair(stage=stages) as pair:
        held = await stages.made[1].lend(single_blocks(0, 1))
        ticket = await pair.grant([0], lease_s=0.1)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            with pytest.raises(TransferTimeout):
                async with asyncio.timeout(DEADLINE_S):
                    await transfer.push(blocks(0))
            assert not transfer.waits_for_memory
        for buffer in held:
            stages.made[1].give_back(buffer)
        assert stages.made[1].num_free == 2


async def test_a_transfer_shows_that_it_waits_for_memory() -> None:
    stages = Stages(2, 8)
    async with worker_pair(stage=stages) as pair:
        held = await stages.made[1].lend(single_blocks(0, 1))
        ticket = await pair.grant([0])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            pushing = asyncio.create_task(transfer.push(blocks(0)))
            await until_idle()
            assert transfer.waits_for_memory
            for buffer in held:
                stages.made[1].give_back(buffer)
            await pushing
            await transfer.finish([5], pair.receiver.commit)
        assert stages.are_empty
