"""What was stored is pushed once, in order, beside the prompt's other work; when the wire fails, that work ends."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.handover.ticket import Ticket
from pdserve.base.errors import PeerLost, TransferTimeout
from pdserve.base.ids import BlockId
from prefill_svc.pusher import pushing
from tests.support.handover import REQUEST, Pair, blocks, worker_pair
from tests.unit.kvtransfer.handover.test_staging import Stages, every_message

TABLE = blocks(5, 3, 1, 0, 2)


async def granted(pair: Pair, *, first_block: int = 0) -> Ticket:
    """For the prompt's blocks from `first_block` on, to the same blocks of the target plus 8."""
    reservation = replace(pair.reservation([8 + each for each in TABLE[first_block:]]), first_block=first_block)
    return await pair.receiver.grant(reservation, attempt=1)


@pytest.mark.parametrize("first_block", [0, 2])
async def test_every_group_of_every_missing_block_goes_once_however_it_is_told(first_block: int) -> None:
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
                pusher.stored(TABLE, 3, num_layers=1)  # Half a group.
                assert pusher.is_idle
                pusher.stored(TABLE, 3, num_layers=2)
                pusher.stored(TABLE, 3, num_layers=3)
                assert not pusher.is_idle
                await pusher.drained()
                pusher.stored(TABLE, 3)
                pusher.stored(TABLE, 3)
                pusher.stored([*TABLE, BlockId(4)], 6, num_layers=2)  # The ticket ends sooner.
                pusher.stored(TABLE, 5)
                await pusher.drained()
                await transfer.finish([1], pair.receiver.commit)
        old, new = TABLE[first_block:3], TABLE[3:]
        assert pushed == [(0, old), (1, old), (2, old), (0, new), (1, new), (2, new)]
        wanted = TABLE[first_block:]
        assert np.array_equal(pair.target.blocks[[8 + each for each in wanted]], pair.source.blocks[wanted])


async def test_a_prompt_that_is_all_there_has_nothing_to_drain() -> None:
    async with worker_pair() as pair:
        ticket = await granted(pair, first_block=5)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer, pushing(transfer, ticket) as pusher:
            pusher.stored(TABLE, 5)
            await pusher.drained()
            await transfer.finish([1], pair.receiver.commit)
        assert len(pair.received) == 1


async def test_a_wire_that_fails_ends_the_prompt_with_its_error() -> None:
    async with worker_pair(max_outstanding_bytes=1) as pair:
        ticket = await granted(pair)
        stray = replace(ticket, tag_base=ticket.tag_base ^ (1 << 40))  # Nobody receives these.
        with pytest.raises(PeerLost):
            async with (
                asyncio.timeout(5),
                pair.sender.open(stray, request_id=REQUEST) as transfer,
                pushing(transfer, stray) as pusher,
            ):
                pusher.stored(TABLE, 5)
                await every_message()
                pair.sending.disconnect(transfer._peer)
                await asyncio.get_running_loop().create_future()  # As a prompt that is being computed.


async def test_a_prompt_that_fails_while_the_wire_does_shows_one_error() -> None:
    async with worker_pair(max_outstanding_bytes=1) as pair:
        ticket = await granted(pair)
        stray = replace(ticket, tag_base=ticket.tag_base ^ (1 << 40))
        with pytest.raises(PeerLost):
            async with pair.sender.open(stray, request_id=REQUEST) as transfer, pushing(transfer, stray) as pusher:
                pusher.stored(TABLE, 5)
                await every_message()
                pair.sending.disconnect(transfer._peer)
                try:
                    await asyncio.get_running_loop().create_future()
                finally:
                    raise TransferTimeout("while it was cancelled")


async def test_leaving_stops_what_still_waits_for_the_wire() -> None:
    async with worker_pair(max_outstanding_bytes=1) as pair:
        ticket = await granted(pair)
        stray = replace(ticket, tag_base=ticket.tag_base ^ (1 << 40), lease_s=0.1)
        async with asyncio.timeout(5), pair.sender.open(stray, request_id=REQUEST) as transfer:
            async with pushing(transfer, stray) as pusher:
                pusher.stored(TABLE, 5)
                await every_message()
            assert transfer.num_unsent == 4
        assert transfer.quiet


async def test_bundles_leave_when_they_are_whole_and_the_last_one_when_all_is_there() -> None:
    async with worker_pair(stage=Stages(16, 16, bundle_blocks=2)) as pair:
        ticket = await granted(pair)
        pushed: list[list[BlockId]] = []
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer, pushing(transfer, ticket) as pusher:
            push = transfer.push

            async def noted(block_ids: list[BlockId], **how: int) -> None:
                pushed.append(list(block_ids))
                await push(block_ids, **how)  # type: ignore[arg-type]

            transfer.push = noted  # type: ignore[method-assign,assignment]
            for num_blocks in range(6):
                pusher.stored(TABLE, num_blocks)
                await pusher.drained()
            await transfer.finish([1], pair.receiver.commit)
        assert pushed == [TABLE[:2], TABLE[2:4], TABLE[4:]]
        assert np.array_equal(pair.target.blocks[[8 + each for each in TABLE]], pair.source.blocks[TABLE])
