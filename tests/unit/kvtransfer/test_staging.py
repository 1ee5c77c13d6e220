"""Blocks stop over in a bounded stage: nothing is lost in it, nobody starves, and it is empty in the end."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.staging import Staged
from pdserve.base.errors import NoFreeBlocks, TransferTimeout
from pdserve.base.ids import BlockId
from tests.unit.kvtransfer.support import LAYOUT, REQUEST, Memory, Pair, blocks, worker_pair


def staged(memory: Memory, num_slots: int = 4) -> Staged:
    return Staged(memory, np.zeros(num_slots * LAYOUT.block_bytes, np.uint8), LAYOUT.block_bytes)


class Stages:
    """Makes the stages of a pair, the sender's first, and keeps them."""

    def __init__(self, *num_slots: int) -> None:
        self._num_slots = list(num_slots)
        self.made: list[Staged] = []

    def __call__(self, memory: Memory) -> Staged:
        # `worker_pair` makes the receiver's first.
        stage = staged(memory, self._num_slots[1 - len(self.made)])
        self.made.append(stage)
        return stage

    @property
    def are_empty(self) -> bool:
        return all(stage.num_free == stage.most for stage in self.made)


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
    held = await stage.lend(blocks(0, 1, 2))
    large = asyncio.create_task(stage.lend(blocks(3, 4)))
    small = asyncio.create_task(stage.lend(blocks(5)))
    await asyncio.sleep(0)
    large.cancel()
    with pytest.raises(asyncio.CancelledError):
        await large
    for buffer in [*held, *await small]:
        stage.give_back(buffer)
    assert stage.num_free == 4


async def test_who_is_cancelled_as_its_turn_comes_gives_it_back() -> None:
    stage = staged(Memory(8, 1))
    held = await stage.lend(blocks(0, 1, 2, 3))
    waiting = asyncio.create_task(stage.lend(blocks(4)))
    await asyncio.sleep(0)
    for buffer in held:
        stage.give_back(buffer)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert stage.num_free == 4


async def test_a_waiter_whom_room_and_cancellation_reach_together_is_cancelled() -> None:
    stage = staged(Memory(8, 1))
    held = await stage.lend(blocks(0, 1, 2, 3))
    waiting = asyncio.create_task(stage.lend(blocks(4)))
    await asyncio.sleep(0)
    waiting.cancel()
    for buffer in held:
        stage.give_back(buffer)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert stage.num_free == 4


async def test_what_can_never_fit_is_refused_with_what_to_do() -> None:
    async with worker_pair(stage=Stages(4, 4)) as pair:
        with pytest.raises(NoFreeBlocks, match=r"5 KV blocks .* room for 4. Raise --staging-memory"):
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
    lent = await stage.lend([BlockId(0), BlockId(1)])
    assert not np.shares_memory(lent[0], lent[1])
    stage.give_back(lent[0])
    with pytest.raises(KeyError):
        stage.give_back(lent[0])
