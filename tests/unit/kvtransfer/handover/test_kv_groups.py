"""A prompt with two KV groups, full and windowed: each sends its own blocks, and none from behind the window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdserve.base.errors import DigestMismatch, LayoutMismatch
from pdserve.base.layout import first_block_read
from prefill_svc.pusher import pushing
from tests.support.groups import TWO_GROUPS, WINDOW
from tests.support.handover import REQUEST, Pair, blocks, in_place, staged_with_copies, worker_pair

pytestmark = pytest.mark.virtual_time

BLOCK, NUM_TOKENS, NUM_BLOCKS = 4, 19, 5
#: The prompt's blocks at the prefill worker. It has given those behind the window to somebody: they must not leave.
FULL, WINDOWED = blocks(8, 3, 1, 0, 2), blocks(13, 13, 13, 5, 4)
AT_TARGET = 7


def memory_of(stage: str) -> object:
    if stage == "in place":
        return lambda memory: in_place(memory, TWO_GROUPS)
    return lambda memory: staged_with_copies(memory, 8, 2, TWO_GROUPS)[0]


async def granted(pair: Pair, num_cached: int) -> object:
    """A ticket for what is missing; ids at the target are lower by 7, modulo 16."""
    window_start = max(num_cached, first_block_read(WINDOW, NUM_TOKENS, BLOCK))
    missing = (FULL[num_cached:], WINDOWED[window_start:])
    reservation = replace(
        pair.reservation([]),
        block_ids=tuple([at_target(block) for block in table] for table in missing),
        first_blocks=(num_cached, window_start),
    )
    return missing, await pair.receiver.grant(reservation, attempt=1)


def at_target(block: int) -> int:
    return (block - AT_TARGET) % 16


@pytest.mark.parametrize("num_cached", [0, 2, 4])
@pytest.mark.parametrize(("layer_groups", "stage"), [(1, "in place"), (3, "in place"), (2, "staged"), (4, "staged")])
async def test_the_blocks_of_both_groups_arrive_once_in_any_number_of_messages(
    layer_groups: int, stage: str, num_cached: int
) -> None:
    async with worker_pair(layer_groups=layer_groups, layout=TWO_GROUPS, stage=memory_of(stage)) as pair:  # type: ignore[arg-type]
        before = pair.target.blocks.copy()
        missing, ticket = await granted(pair, num_cached)
        ticket.require_end_of(NUM_TOKENS)
        async with (
            pair.sender.open(ticket, request_id=REQUEST) as transfer,
            pushing(transfer, ticket, num_prompt_tokens=NUM_TOKENS) as pusher,
        ):
            for stop in (7, 16, NUM_TOKENS):
                for num_layers in (1, 3, 5):  # The window's layers are 0, 1, 3 and 4, the others 2 and 5.
                    pusher.stored((FULL, WINDOWED), stop, num_layers=num_layers)
                pusher.stored((FULL, WINDOWED), stop)
            await pusher.drained()
            assert transfer.num_unsent == 0
            received = await transfer.finish([1], pair.receiver.commit)
        sent = [block for table in missing for block in table]
        assert received.received_blocks == transfer.stats.sent_blocks == len(sent)
        for block in sent:
            assert np.array_equal(pair.target.blocks[at_target(block)], pair.source.blocks[block])
        others = [block for block in range(16) if block not in map(at_target, sent)]
        assert np.array_equal(pair.target.blocks[others], before[others])


async def test_a_wrong_byte_in_the_second_group_is_found() -> None:
    async with worker_pair(layer_groups=2, layout=TWO_GROUPS, stage=memory_of("in place")) as pair:  # type: ignore[arg-type]
        _, ticket = await granted(pair, 0)
        async with (
            pair.sender.open(ticket, request_id=REQUEST) as transfer,
            pushing(transfer, ticket, num_prompt_tokens=NUM_TOKENS) as pusher,
        ):
            pusher.stored((FULL, WINDOWED), NUM_TOKENS)
            await pusher.drained()
            transfer._digests.add(ticket.shape.num_messages - 1, bytes(16))
            with pytest.raises(DigestMismatch, match="1 of 14 layer groups of 7 blocks are not what was sent"):
                await transfer.finish([1], pair.receiver.commit)


async def test_a_ticket_of_a_worker_with_one_group_is_refused() -> None:
    async with worker_pair(layout=TWO_GROUPS, stage=memory_of("in place")) as pair, worker_pair() as other:  # type: ignore[arg-type]
        ticket = await other.grant([0, 1])
        with pytest.raises(LayoutMismatch):
            pair.sender.require_compatible(ticket)
