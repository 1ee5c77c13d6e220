"""Blocks that travel as layer groups: cut without gaps, sent in any order of groups, accepted only as a whole."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.layer_groups import LayerGroups, TransferShape
from kvtransfer.handover.ticket import signed_commit
from kvtransfer.transport import Buffer, Operation, Peer
from pdserve.base.errors import DigestMismatch, InvalidTransition, TransferTimeout
from tests.support import handover as support
from tests.support.handover import LAYOUT, REQUEST, Stages, blocks, not_received, push_all, until_idle, worker_pair

pytestmark = pytest.mark.virtual_time

LAYER_BYTES = LAYOUT.block_bytes // LAYOUT.num_layers


class Recorded:
    """A device event that must not be waited for here."""

    def wait(self) -> None:
        raise AssertionError("only the copies wait for it")


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 30, 31, 32])
def test_groups_cover_all_layers_in_order_and_differ_by_one_layer_at_most(num_layers: int) -> None:
    layout = replace(LAYOUT, groups=(replace(LAYOUT.only_group, layers=tuple(range(num_layers))),))
    for count in range(1, num_layers + 1):
        groups = LayerGroups.of(layout, count)
        assert groups.count == count
        assert [layer for group in groups.layers for layer in range(num_layers)[group]] == [*range(num_layers)]
        sizes = [group.stop - group.start for group in groups.layers]
        assert max(sizes) - min(sizes) <= 1
        bytes_of = [range(layout.block_bytes)[span] for span in groups.spans]
        assert [len(each) for each in bytes_of] == [size * LAYER_BYTES for size in sizes]
        assert [byte for each in bytes_of for byte in each] == [*range(layout.block_bytes)]
        assert groups.max_block_bytes == max(len(each) for each in bytes_of)


def test_a_group_is_complete_with_its_last_layer() -> None:
    groups = LayerGroups.of(LAYOUT, 3)
    assert groups.ends == (2, 3, 4)
    assert [groups.completed_by(layers) for layers in range(5)] == [[], [], [0], [0, 1], [0, 1, 2]]


def test_messages_are_named_after_blocks_bundles_and_groups() -> None:
    whole = TransferShape.of(num_blocks=[12], bundle_blocks=1, layer_groups=[1])
    assert (whole.num_messages, whole.name(7), str(whole)) == (12, "block 7", "12 blocks")
    cut = TransferShape.of(num_blocks=[23], bundle_blocks=2, layer_groups=[3])
    assert (cut.num_messages, cut.name(7), str(cut)) == (
        36,
        "layer group 1 of bundle 2",
        "36 layer groups of 12 bundles",
    )


@pytest.mark.parametrize("layer_groups", [1, 2, 3, 4])
@pytest.mark.parametrize("in_place", [True, False])
async def test_blocks_arrive_whole_in_any_number_of_groups(layer_groups: int, in_place: bool) -> None:
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


async def test_a_group_arrives_while_later_layers_are_still_being_computed() -> None:
    async with worker_pair(layer_groups=2) as pair:
        pair.target.blocks[:] = 0
        ticket = await pair.grant([3])
        computed = pair.source.blocks[0].copy()
        pair.source.blocks[0, 2 * LAYER_BYTES :] = 77
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0), group=0)
            await until_idle()
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
            messages = [pair.source.blocks[block][span] for block in (0, 1) for span in ticket.groups.spans]
            digests = tuple(map(MessageDigest(ticket.key), messages))
            commit = signed_commit(ticket, request_id=REQUEST, digests=digests, first_tokens=(9,))
            early = asyncio.ensure_future(pair.receiver.commit(commit))
            await until_idle()
            assert not early.done()
            with pytest.raises(InvalidTransition, match="1 of 6 layer groups of 2 blocks were not sent"):
                await transfer.finish([9], pair.receiver.commit)
            await transfer.push(blocks(1), group=2)
            assert (await early).first_tokens == (9,)


@pytest.mark.parametrize("wrong", range(6))
async def test_a_wrong_byte_in_any_group_refuses_the_transfer_and_names_the_group(wrong: int) -> None:
    async with worker_pair(layer_groups=3) as pair:
        post_send = pair.sending.post_send

        def corrupting(peer: Peer, tag: int, buffer: Buffer) -> Operation:
            if tag == ticket.tag(wrong):
                buffer = buffer.copy()
                buffer[-1] ^= 1
            return post_send(peer, tag, buffer)

        pair.sending.post_send = corrupting  # type: ignore[method-assign]
        ticket = await pair.grant([0, 1])
        named = (
            "1 of 6 layer groups of 2 blocks are not what was sent, "
            f"the first is layer group {wrong % 3} of block {wrong // 3}"
        )
        with pytest.raises(DigestMismatch, match=named):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await push_all(transfer, 4, 5)
                await transfer.finish([1], pair.receiver.commit)
        assert pair.received == []


async def test_digests_of_whole_blocks_cannot_commit_a_transfer_in_groups() -> None:
    async with worker_pair(layer_groups=2) as pair:
        ticket = await pair.grant([0])
        commit = signed_commit(ticket, request_id=REQUEST, digests=(bytes(16),), first_tokens=(1,))
        with pytest.raises(DigestMismatch, match="1 digests for 2 layer groups of 1 blocks"):
            await pair.receiver.commit(commit)


async def test_the_window_counts_bytes_not_messages() -> None:
    async with worker_pair(layer_groups=4, max_outstanding_bytes=LAYOUT.block_bytes) as pair:
        ticket = await pair.grant([0, 1, 2, 3, 4, 5])
        async with pair.sender.open(not_received(ticket), request_id=REQUEST) as transfer:
            pushing = asyncio.ensure_future(transfer.push(blocks(0, 1, 2, 3, 4, 5), group=0))
            await until_idle()
            assert transfer._machine.num_outstanding == 4
            pushing.cancel()
            pair.sending.disconnect(transfer._peer)


async def test_a_transfer_holds_memory_only_for_messages_on_their_way() -> None:
    stages = Stages(4, 4)
    async with worker_pair(layer_groups=2, stage=stages) as pair:
        ticket = await pair.grant([8, 9])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            assert stages.are_empty
            stages.copies[0].may_end.clear()
            await transfer.push(blocks(0, 1), group=0)
            await until_idle()
            assert [stage.num_free for stage in stages.made] == [2, 4]
            stages.copies[0].may_end.set()
            await until_idle()
            assert stages.are_empty
            await transfer.push(blocks(0, 1), group=1)
            await transfer.finish([1], pair.receiver.commit)
        assert stages.are_empty


async def test_a_copy_takes_the_groups_layers_and_waits_for_their_event() -> None:
    stages = Stages(32, 4)  # Two may be copied at once.
    async with worker_pair(layer_groups=3, stage=stages) as pair:
        stored, loaded = stages.copies
        ticket = await pair.grant([8, 9])
        first, second = Recorded(), Recorded()
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1), group=0, after=first)
            await transfer.push(blocks(0, 1), group=1, after=second)
            await transfer.push(blocks(0, 1), group=2)
            await transfer.finish([1], pair.receiver.commit)
        assert loaded.layers == [(0, 2), (2, 3), (3, 4)]
        assert loaded.events == [first, second, None]
        assert set(stored.layers) == set(loaded.layers)


async def test_groups_that_arrive_during_a_copy_are_stored_group_by_group() -> None:
    stages = Stages(4, 8)
    async with worker_pair(layer_groups=2, stage=stages) as pair:
        stored = stages.copies[0]
        stored.may_end.clear()
        ticket = await pair.grant([8, 9, 10])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0), group=1)
            await stored.has_started.wait()
            await transfer.push(blocks(1), group=1)
            await transfer.push(blocks(0, 1, 2), group=0)
            await transfer.push(blocks(2), group=1)
            await until_idle()
            stored.may_end.set()
            await transfer.finish([5], pair.receiver.commit)
        assert list(zip(stored.started, stored.layers, strict=True)) == [
            ([8], (2, 4)),
            ([9, 10], (2, 4)),
            ([8, 9, 10], (0, 2)),
        ]
        assert np.array_equal(pair.target.blocks[8:11], pair.source.blocks[:3])


async def test_a_transfer_aborted_between_two_groups_empties_the_stages_and_writes_nothing_more() -> None:
    stages = Stages(4, 4)
    async with worker_pair(layer_groups=2, stage=stages) as pair:
        ticket = await pair.grant([8, 9])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1), group=0)
            await pair.receiver.abort(ticket.transfer_id)
            pair.target.blocks[8:10] = 42
            await transfer.push(blocks(0, 1), group=1)
        await until_idle()
        assert (pair.target.blocks[8:10] == 42).all()
        assert stages.are_empty


async def test_a_renewed_ticket_needs_every_group_again() -> None:
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


async def test_every_group_that_arrives_renews_the_lease_and_silence_ends_it() -> None:
    async with worker_pair(layer_groups=4) as pair:
        loop = asyncio.get_running_loop()
        expired = loop.create_future()
        reservation = replace(pair.reservation([0, 1], lease_s=10), on_expired=expired.set_result)
        ticket = await pair.receiver.grant(reservation, attempt=1)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await asyncio.sleep(8)
            await transfer.push(blocks(0, 1), group=2)
            error = await expired
            assert loop.time() == pytest.approx(18, abs=0.01)
        assert isinstance(error, TransferTimeout)
        assert "2 of 8 layer groups of 2 blocks had arrived" in str(error)
