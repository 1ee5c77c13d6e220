"""Receiver and sender together: the whole handover within one process, and how it can go wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.handover.digest import MessageDigest
from kvtransfer.handover.reservation import Received
from kvtransfer.handover.ticket import Commit, signed_commit
from pdserve.base.errors import (
    DigestMismatch,
    LayoutMismatch,
    PeerLost,
    StaleAttempt,
    StaleEpoch,
    StaleError,
    TransferError,
)
from pdserve.base.ids import Epoch, RequestId, TransferId
from tests.support.handover import LAYOUT, REQUEST, Pair, blocks, not_received, until_idle, worker_pair

pytestmark = pytest.mark.virtual_time


async def hand_over(pair: Pair, source_ids: list[int], target_ids: list[int]) -> Received:
    ticket = await pair.grant(target_ids)
    async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
        await transfer.push(blocks(*source_ids))
        return await transfer.finish([5], pair.receiver.commit)


async def test_blocks_arrive_and_the_request_is_notified_once() -> None:
    async with worker_pair() as pair:
        result = await hand_over(pair, [3, 1, 2], [7, 8, 9])
        assert np.array_equal(pair.target.blocks[[7, 8, 9]], pair.source.blocks[[3, 1, 2]])
        assert pair.received == [result]
        assert result.first_tokens == (5,)
        assert result.received_bytes == 3 * LAYOUT.block_bytes
        assert pair.expired == []
        assert pair.receiver.num_transfers == 0


async def test_blocks_can_be_pushed_chunk_by_chunk() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0, 1, 2, 3])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(4, 5))
            assert transfer.num_unsent == 2
            await transfer.push(blocks(6))
            await transfer.push(blocks(7))
            await transfer.finish([1], pair.receiver.commit)
            stats = transfer.stats
        assert np.array_equal(pair.target.blocks[:4], pair.source.blocks[4:8])
        assert stats.sent_blocks == 4
        assert stats.sent_bytes == 4 * LAYOUT.block_bytes
        assert stats.first_started_at is not None
        assert stats.last_done_at is not None
        assert 0 <= stats.busy_s <= stats.last_done_at - stats.first_started_at


async def test_a_prompt_fully_cached_by_the_decode_worker_needs_only_the_commit() -> None:
    async with worker_pair() as pair:
        result = await hand_over(pair, [], [])
        assert result.received_bytes == 0
        assert pair.received == [result]


async def test_no_more_than_the_window_is_outstanding() -> None:
    async with worker_pair(max_outstanding_bytes=2 * LAYOUT.block_bytes) as pair:
        ticket = await pair.grant([0, 1, 2, 3, 4, 5])
        async with pair.sender.open(not_received(ticket), request_id=REQUEST) as transfer:
            pushing = asyncio.ensure_future(transfer.push(blocks(0, 1, 2)))
            await until_idle()
            assert not pushing.done()
            assert transfer.num_unsent == 4
            pushing.cancel()
            assert not transfer.quiet
            pair.receiving._matcher.clear()[1][0].complete()
            pair.sending.disconnect(transfer._peer)
        assert transfer.quiet


async def test_a_commit_that_overtakes_the_blocks_waits_for_them() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0, 1])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0))
            digests = tuple(map(MessageDigest(ticket.key), pair.source.blocks[:2]))
            commit = signed_commit(ticket, request_id=REQUEST, digests=digests, first_tokens=(9,))
            early = asyncio.ensure_future(pair.receiver.commit(commit))
            await until_idle()
            assert not early.done()
            await transfer.push(blocks(1))
            assert (await early).first_tokens == (9,)


async def test_a_repeated_commit_gets_the_same_answer_and_notifies_the_request_once() -> None:
    async with worker_pair() as pair:
        seen: list[Commit] = []

        async def twice(commit: Commit) -> Received:
            seen.append(commit)
            assert await pair.receiver.commit(commit) == await pair.receiver.commit(commit)
            return await pair.receiver.commit(commit)

        ticket = await pair.grant([0])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0))
            await transfer.finish([1], twice)
        assert len(pair.received) == 1


async def test_wrong_bytes_are_refused_and_the_blocks_wait_for_a_new_ticket() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0, 1])

        async def corrupting(commit: Commit) -> Received:
            broken = list(commit.digests)
            broken[1] = bytes(16)
            forged = signed_commit(ticket, request_id=REQUEST, digests=tuple(broken), first_tokens=(1,))
            return await pair.receiver.commit(forged)

        with pytest.raises(DigestMismatch, match="block 1"):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await transfer.push(blocks(0, 1))
                await transfer.finish([1], corrupting)
        assert pair.received == []
        assert pair.receiver.num_transfers == 1
        fresh = await pair.receiver.renew(ticket.transfer_id, attempt=2)
        async with pair.sender.open(fresh, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1))
            await transfer.finish([1], pair.receiver.commit)
        assert np.array_equal(pair.target.blocks[:2], pair.source.blocks[:2])
        assert len(pair.received) == 1


async def test_a_commit_that_is_not_signed_with_the_key_changes_nothing() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0])

        async def attacked(commit: Commit) -> Received:
            for forged in (replace(commit, mac=bytes(32)), replace(commit, first_tokens=(2,))):
                with pytest.raises(DigestMismatch, match="not signed"):
                    await pair.receiver.commit(forged)
            return await pair.receiver.commit(commit)

        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0))
            await transfer.finish([1], attacked)
        assert [result.first_tokens for result in pair.received] == [(1,)]


async def test_commits_of_other_incarnations_attempts_requests_and_transfers_are_stale() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([], attempt=3)

        async def commit(**changes: object) -> Received:
            changed = replace(ticket, **{k: v for k, v in changes.items() if k != "request_id"})  # type: ignore[arg-type]
            request_id = RequestId(str(changes.get("request_id", REQUEST)))
            return await pair.receiver.commit(
                signed_commit(changed, request_id=request_id, digests=(), first_tokens=(1,))
            )

        with pytest.raises(StaleEpoch):
            await commit(epoch=Epoch(78))
        with pytest.raises(StaleError, match="no such transfer"):
            await commit(transfer_id=TransferId(bytes(16)))
        with pytest.raises(StaleAttempt):
            await commit(attempt=2)
        with pytest.raises(StaleError, match="granted to request r1"):
            await commit(request_id="another")
        assert pair.received == []
        assert (await commit()).first_tokens == (1,)


async def test_an_aborted_transfer_is_never_written_again() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0, 1])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0))
            await pair.receiver.abort(ticket.transfer_id)
            pair.target.blocks[:2] = 42
            await transfer.push(blocks(1))
            with pytest.raises(StaleError):
                await transfer.finish([1], pair.receiver.commit)
        assert (pair.target.blocks[:2] == 42).all()
        assert pair.received == []
        assert pair.expired == []
        await pair.receiver.abort(ticket.transfer_id)  # A transfer that is over or unknown is left alone.


async def test_a_renewed_ticket_fences_off_the_old_one() -> None:
    async with worker_pair() as pair:
        old = await pair.grant([0, 1])
        new = await pair.receiver.renew(old.transfer_id, attempt=2)
        assert (new.transfer_id, new.tag_base, new.key) != (old.transfer_id, old.tag_base, old.key)
        async with pair.sender.open(old, request_id=REQUEST) as late:
            await late.push(blocks(5, 6))
            with pytest.raises(StaleError):
                await late.finish([1], pair.receiver.commit)
        async with pair.sender.open(new, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0, 1))
            await transfer.finish([2], pair.receiver.commit)
        assert np.array_equal(pair.target.blocks[:2], pair.source.blocks[:2])
        with pytest.raises(StaleError):
            await pair.receiver.renew(new.transfer_id, attempt=3)


async def test_a_ticket_is_not_renewed_for_an_older_attempt() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0], attempt=4)
        with pytest.raises(StaleAttempt):
            await pair.receiver.renew(ticket.transfer_id, attempt=4)
        assert pair.receiver.num_transfers == 1


async def test_opening_a_transfer_to_a_worker_that_is_gone_reports_it_lost() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0])
        await pair.receiving.close()
        with pytest.raises(PeerLost):
            async with pair.sender.open(ticket, request_id=REQUEST):
                pass


async def test_incompatible_tickets_are_refused_before_anything_is_sent() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0])
        with pytest.raises(LayoutMismatch, match="block_size"):
            async with pair.sender.open(replace(ticket, layout=replace(LAYOUT, block_size=8)), request_id=REQUEST):
                pass
        with pytest.raises(TransferError, match="--transport"):
            async with pair.sender.open(replace(ticket, transport="ucx"), request_id=REQUEST):
                pass
