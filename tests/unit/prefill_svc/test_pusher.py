"""Stored blocks are pushed once, in order, while the prompt is computed; a wire that fails ends the prompt."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.handover.outgoing import OutgoingTransfer
from kvtransfer.handover.ticket import Ticket
from pdserve.base.errors import PeerLost, TransferTimeout
from pdserve.base.ids import BlockId
from prefill_svc.pusher import Pusher
from prefill_svc.pusher import pushing as pushing_prompt
from tests.support.handover import LAYOUT, REQUEST, Pair, Stages, blocks, not_received, until_idle, worker_pair

pytestmark = pytest.mark.virtual_time

TABLE = blocks(5, 3, 1, 0, 2)
BLOCK = LAYOUT.block_size
#: Tokens of a prompt that fills its last block by one.
PROMPT_TOKENS = 4 * BLOCK + 1


async def granted(pair: Pair, *, first_block: int = 0) -> Ticket:
    """A ticket for the prompt's blocks from `first_block` on; their ids at the target are higher by 8."""
    reservation = replace(pair.reservation([8 + each for each in TABLE[first_block:]]), first_blocks=(first_block,))
    return await pair.receiver.grant(reservation, attempt=1)


def pushing(transfer: OutgoingTransfer, ticket: Ticket) -> AbstractAsyncContextManager[Pusher]:
    return pushing_prompt(transfer, ticket, num_prompt_tokens=PROMPT_TOKENS)


@pytest.mark.parametrize("first_block", [0, 2])
async def test_every_group_of_every_missing_block_goes_once_however_it_is_reported(first_block: int) -> None:
    async with worker_pair(layer_groups=3) as pair:
        ticket = await granted(pair, first_block=first_block)
        pushed: list[tuple[int, list[BlockId]]] = []
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            push = transfer.push

            async def noted(block_ids: list[BlockId], **how: int) -> None:
                pushed.append((how["group"], list(block_ids)))
                await push(block_ids, **how)  # type: ignore[arg-type]

            transfer.push = noted  # type: ignore[method-assign,assignment]
            async with pushing(transfer, ticket) as pusher:
                assert pusher.is_idle
                pusher.stored([TABLE], 3 * BLOCK, num_layers=1)  # Half a group.
                assert pusher.is_idle
                pusher.stored([TABLE], 3 * BLOCK, num_layers=2)
                pusher.stored([TABLE], 3 * BLOCK, num_layers=3)
                assert not pusher.is_idle
                await pusher.drained()
                pusher.stored([TABLE], 3 * BLOCK)
                pusher.stored([TABLE], 3 * BLOCK)
                pusher.stored([[*TABLE, BlockId(4)]], 6 * BLOCK, num_layers=2)  # The ticket ends sooner.
                pusher.stored([TABLE], PROMPT_TOKENS)
                await pusher.drained()
                await transfer.finish([1], pair.receiver.commit)
        old, new = TABLE[first_block:3], TABLE[3:]
        assert pushed == [(0, old), (1, old), (2, old), (0, new), (1, new), (2, new)]
        wanted = TABLE[first_block:]
        assert np.array_equal(pair.target.blocks[[8 + each for each in wanted]], pair.source.blocks[wanted])


async def test_a_partial_block_is_pushed_only_once_the_prompt_is_complete() -> None:
    async with worker_pair() as pair:
        ticket = await granted(pair)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer, pushing(transfer, ticket) as pusher:
            pusher.stored([TABLE], BLOCK - 1)
            assert pusher.is_idle
            pusher.stored([TABLE], 4 * BLOCK)
            await pusher.drained()
            assert transfer.num_unsent == 1
            pusher.stored([TABLE], PROMPT_TOKENS)
            await pusher.drained()
            assert transfer.num_unsent == 0
            await transfer.finish([1], pair.receiver.commit)


async def test_a_prompt_whose_blocks_are_all_cached_has_nothing_to_drain() -> None:
    async with worker_pair() as pair:
        ticket = await granted(pair, first_block=5)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer, pushing(transfer, ticket) as pusher:
            pusher.stored([TABLE], PROMPT_TOKENS)
            await pusher.drained()
            await transfer.finish([1], pair.receiver.commit)
        assert len(pair.received) == 1


async def test_a_wire_that_fails_ends_the_prompt_with_its_error() -> None:
    async with worker_pair(max_outstanding_bytes=1) as pair:
        ticket = await granted(pair)
        stray = not_received(ticket)
        with pytest.raises(PeerLost):
            async with (
                pair.sender.open(stray, request_id=REQUEST) as transfer,
                pushing(transfer, stray) as pusher,
            ):
                pusher.stored([TABLE], PROMPT_TOKENS)
                await until_idle()
                pair.sending.disconnect(transfer._peer)
                await asyncio.get_running_loop().create_future()  # Stands for the computing of the prompt.


async def test_a_prompt_that_fails_together_with_the_wire_raises_one_error() -> None:
    async with worker_pair(max_outstanding_bytes=1) as pair:
        ticket = await granted(pair)
        stray = not_received(ticket)
        with pytest.raises(PeerLost):
            async with pair.sender.open(stray, request_id=REQUEST) as transfer, pushing(transfer, stray) as pusher:
                pusher.stored([TABLE], PROMPT_TOKENS)
                await until_idle()
                pair.sending.disconnect(transfer._peer)
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    raise TransferTimeout("while it was cancelled")


async def test_leaving_drops_the_blocks_that_still_wait_for_the_wire() -> None:
    async with worker_pair(max_outstanding_bytes=1) as pair:
        ticket = await granted(pair)
        stray = not_received(ticket)
        async with pair.sender.open(stray, request_id=REQUEST) as transfer:
            async with pushing(transfer, stray) as pusher:
                pusher.stored([TABLE], PROMPT_TOKENS)
                await until_idle()
            assert transfer.num_unsent == 4
        assert transfer.quiet


async def test_a_bundle_leaves_when_it_is_complete_and_the_last_one_with_the_prompt() -> None:
    async with worker_pair(stage=Stages(16, 16, bundle_blocks=2)) as pair:
        ticket = await granted(pair)
        pushed: list[list[BlockId]] = []
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer, pushing(transfer, ticket) as pusher:
            push = transfer.push

            async def noted(block_ids: list[BlockId], **how: int) -> None:
                pushed.append(list(block_ids))
                await push(block_ids, **how)  # type: ignore[arg-type]

            transfer.push = noted  # type: ignore[method-assign,assignment]
            for num_tokens in range(PROMPT_TOKENS + 1):
                pusher.stored([TABLE], num_tokens)
                await pusher.drained()
            await transfer.finish([1], pair.receiver.commit)
        assert pushed == [TABLE[:2], TABLE[2:4], TABLE[4:]]
        assert np.array_equal(pair.target.blocks[[8 + each for each in TABLE]], pair.source.blocks[TABLE])
