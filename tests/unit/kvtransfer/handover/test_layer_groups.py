"""Blocks that travel as groups of layers: cut without a gap, sent in any order of groups, accepted only as a whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.handover.layer_groups import LayerGroups, message_name, messages
from kvtransfer.handover.ticket import signed_commit
from kvtransfer.transport import Buffer, Operation, Peer
from pdserve.base.errors import DigestMismatch, InvalidTransition, TransferTimeout
from tests.support import handover as support
from tests.support.handover import LAYOUT, REQUEST, blocks, push_all, worker_pair
from tests.unit.kvtransfer.handover.test_staging import Stages, every_message

LAYER_BYTES = LAYOUT.block_bytes // LAYOUT.num_layers


class Passed:
    """A moment that only has a name."""

    def wait(self) -> None:
        raise AssertionError("the copies wait, nobody else")


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 30, 31, 32])
def test_groups_are_all_layers_in_order_and_differ_by_one_layer_at_most(num_layers: int) -> None:
    layout = replace(LAYOUT, num_layers=num_layers)
    for count in range(1, num_layers + 1):
        groups = LayerGroups.of(layout, count)
        assert groups.count == count
        assert [layer for group in groups.layers for layer in range(num_layers)[group]] == [*range(num_layers)]
        sizes = [group.stop - group.start for group in groups.layers]
        assert max(sizes) - min(sizes) <= 1
        bytes_of = [range(layout.block_bytes)[span] for span in groups.spans]
        assert [len(each) for each in bytes_of] == [size * LAYER_BYTES for size in sizes]
        assert [place for each in bytes_of for place in each] == [*range(layout.block_bytes)]
        assert groups.max_block_bytes == max(len(each) for each in bytes_of)


def test_layers_complete_the_groups_that_end_with_them() -> None:
    groups = LayerGroups.of(LAYOUT, 3)
    assert groups.ends == (2, 3, 4)
    assert [groups.num_completed_by(layers) for layers in range(5)] == [0, 0, 1, 2, 3]


def test_messages_are_called_what_they_are() -> None:
    assert (message_name(7, 1, "block"), messages(12, 1, "block")) == ("block 7", "12 blocks")
    assert (message_name(7, 3, "bundle"), messages(12, 3, "bundle")) == (
        "group 1 of bundle 2",
        "36 parts of 12 bundles",
    )


@pytest.mark.parametrize("layer_groups", [1, 2, 3, 4])
@pytest.mark.parametrize("in_place", [True, False])
async def test_blocks_arrive_whole_however_many_groups_they_travel_in(layer_groups: int, in_place: bool) -> None:
    stages = Stages(2, 5)
    async with worker_pair(layer_groups=layer_groups, stage=support.in_place if in_place else stages) as pair:
        ticket = await pair.grant([8, 9, 10, 11, 12])
        assert ticket.layer_groups == layer_groups
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await push_all(transfer, 0, 1, 2)
            assert transfer.num_unsent == 2 * layer_groups
            await push_all(transfer, 3, 4)
            result = await transfer.finish([5], pair.receiver.commit)
            stats = transfer.stats
        assert np.array_equal(pair.target.blocks[8:13], pair.source.blocks[:5])
        assert pair.received == [result]
        assert (stats.sent_blocks, stats.sent_bytes) == (5, 5 * LAYOUT.block_bytes)
        assert (result.received_blocks, result.received_bytes) == (5, 5 * LAYOUT.block_bytes)
        assert stages.are_empty


async def test_a_group_lands_in_its_layers_while_the_others_are_still_computed() -> None:
    async with worker_pair(layer_groups=2) as pair:
        pair.target.blocks[:] = 0
        ticket = await pair.grant([3])
        computed = pair.source.blocks[0].copy()
        pair.source.blocks[0, 2 * LAYER_BYTES :] = 77
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0), group=0)
            await every_message()
            assert np.array_equal(pair.target.blocks[3, : 2 * LAYER_BYTES], computed[: 2 * LAYER_BYTES])
            assert not pair.target.blocks[3, 2 * LAYER_BYTES :].any()
            pair.source.blocks[0] = computed
            await transfer.push(blocks(0), group=1)
            await transfer.finish([5], pair.receiver.commit)
        assert np.array_equal(pair.target.blocks[3], computed)


async def test_a_commit_waits_for_the_last_group_of_the_last_block() -> None:
    async with worker_pair(layer_groups=3) as pair:
        ticket = await pair.grant([0, 1])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1), group=0)
            await transfer.push(blocks(0, 1), group=1)
            await transfer.push(blocks(0), group=2)
            parts = [pair.source.blocks[block][span] for block in (0, 1) for span in ticket.groups.spans]
            digests = tuple(map(transfer._digest, parts))
            commit = signed_commit(ticket, request_id=REQUEST, digests=digests, first_tokens=(9,))
            early = asyncio.ensure_future(pair.receiver.commit(commit))
            await every_message()
            assert not early.done()
            with pytest.raises(InvalidTransition, match="1 of 6 parts of 2 blocks were not sent"):
                await transfer.finish([9], pair.receiver.commit)
            await transfer.push(blocks(1), group=2)
            assert (await early).first_tokens == (9,)


@pytest.mark.parametrize("wrong", range(6))
async def test_a_wrong_byte_in_any_group_refuses_the_whole_and_is_named(wrong: int) -> None:
    async with worker_pair(layer_groups=3) as pair:
        post_send = pair.sending.post_send

        def corrupting(peer: Peer, tag: int, buffer: Buffer) -> Operation:
            if tag == ticket.tag(wrong):
                buffer = buffer.copy()
                buffer[-1] ^= 1
            return post_send(peer, tag, buffer)

        pair.sending.post_send = corrupting  # type: ignore[method-assign]
        ticket = await pair.grant([0, 1])
        named = rf"1 of 6 parts of 2 blocks are not what was sent, the first is group {wrong % 3} of block {wrong // 3}"
        with pytest.raises(DigestMismatch, match=named):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await push_all(transfer, 4, 5)
                await transfer.finish([1], pair.receiver.commit)
        assert pair.received == []


async def test_digests_of_whole_blocks_do_not_commit_a_transfer_in_groups() -> None:
    async with worker_pair(layer_groups=2) as pair:
        ticket = await pair.grant([0])
        commit = signed_commit(ticket, request_id=REQUEST, digests=(bytes(16),), first_tokens=(1,))
        with pytest.raises(DigestMismatch, match="1 digests for 2 parts of 1 blocks"):
            await pair.receiver.commit(commit)


async def test_the_window_is_counted_in_bytes_whatever_the_groups() -> None:
    async with worker_pair(layer_groups=4, max_outstanding_bytes=LAYOUT.block_bytes) as pair:
        ticket = await pair.grant([0, 1, 2, 3, 4, 5])
        stray = replace(ticket, tag_base=ticket.tag_base ^ (1 << 40))  # Nobody receives these.
        async with pair.sender.open(stray, request_id=REQUEST) as transfer:
            pushing = asyncio.ensure_future(transfer.push(blocks(0, 1, 2, 3, 4, 5), group=0))
            await every_message()
            assert transfer._machine.num_outstanding == 4
            pushing.cancel()
            pair.sending.disconnect(transfer._peer)


async def test_a_slot_is_kept_until_every_group_of_its_block_is_stored() -> None:
    stages = Stages(4, 4)
    async with worker_pair(layer_groups=2, stage=stages) as pair:
        receiving, sending = stages.made
        ticket = await pair.grant([8, 9])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1), group=0)
            await every_message()
            # The sender needs its own only for what is on its way.
            assert (receiving.num_free, sending.num_free) == (2, 4)
            await transfer.push(blocks(0), group=1)
            await every_message()
            assert receiving.num_free == 3
            await transfer.push(blocks(1), group=1)
            await transfer.finish([1], pair.receiver.commit)
        assert stages.are_empty


async def test_only_the_groups_layers_are_copied_and_not_before_they_are_written() -> None:
    stages = Stages(32, 4)  # Two may be copied at once.
    async with worker_pair(layer_groups=3, stage=stages) as pair:
        stored, loaded = stages.copies
        ticket = await pair.grant([8, 9])
        first, second = Passed(), Passed()
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1), group=0, after=first)
            await transfer.push(blocks(0, 1), group=1, after=second)
            await transfer.push(blocks(0, 1), group=2)
            await transfer.finish([1], pair.receiver.commit)
        assert loaded.layers == [(0, 2), (2, 3), (3, 4)]
        assert loaded.moments == [first, second, None]
        assert set(stored.layers) == set(loaded.layers)


async def test_groups_that_arrive_during_a_copy_are_stored_group_by_group() -> None:
    stages = Stages(4, 4)
    async with worker_pair(layer_groups=2, stage=stages) as pair:
        stored = stages.copies[0]
        stored.goes_on.clear()
        ticket = await pair.grant([8, 9, 10])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0), group=1)
            await stored.has_begun.wait()
            await transfer.push(blocks(1), group=1)
            await transfer.push(blocks(0, 1, 2), group=0)
            await transfer.push(blocks(2), group=1)
            await every_message()
            stored.goes_on.set()
            await transfer.finish([5], pair.receiver.commit)
        assert list(zip(stored.begun, stored.layers, strict=True)) == [
            ([8], (2, 4)),
            ([9, 10], (2, 4)),
            ([8, 9, 10], (0, 2)),
        ]
        assert np.array_equal(pair.target.blocks[8:11], pair.source.blocks[:3])


async def test_a_transfer_given_up_between_two_groups_leaves_the_stages_empty_and_is_not_written_again() -> None:
    stages = Stages(4, 4)
    async with worker_pair(layer_groups=2, stage=stages) as pair:
        ticket = await pair.grant([8, 9])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1), group=0)
            await pair.receiver.abort(ticket.transfer_id)
            pair.target.blocks[8:10] = 42
            await transfer.push(blocks(0, 1), group=1)
        await every_message()
        assert (pair.target.blocks[8:10] == 42).all()
        assert stages.are_empty


async def test_a_renewed_ticket_asks_for_every_group_again() -> None:
    async with worker_pair(layer_groups=2) as pair:
        old = await pair.grant([0, 1])
        async with pair.sender.open(old, request_id=REQUEST) as transfer:
            await transfer.push(blocks(4, 5), group=0)
        new = await pair.receiver.renew(old.transfer_id, attempt=2)
        assert new.layer_groups == 2
        async with pair.sender.open(new, request_id=REQUEST) as transfer:
            assert transfer.num_unsent == 4
            await push_all(transfer, 6, 7)
            await transfer.finish([2], pair.receiver.commit)
        assert np.array_equal(pair.target.blocks[:2], pair.source.blocks[6:8])


async def test_every_group_that_arrives_keeps_the_lease_and_silence_ends_it() -> None:
    async with worker_pair(layer_groups=4) as pair:
        expired = asyncio.get_running_loop().create_future()
        reservation = replace(pair.reservation([0, 1], lease_s=0.1), on_expired=expired.set_result)
        ticket = await pair.receiver.grant(reservation, attempt=1)
        machine = pair.receiver._incoming[ticket.transfer_id].machine
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            before = machine.deadline
            await transfer.push(blocks(0, 1), group=2)
            await every_message()
            assert machine.deadline > before
            error = await expired
        assert isinstance(error, TransferTimeout)
        assert "2 of 8 parts of 2 blocks had arrived" in str(error)
