"""Receiver and sender together, over memory: the whole handover and how it goes wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.handover.reservation import Received
from kvtransfer.handover.ticket import Commit, signed_commit
from pdserve.base.errors import (
    DigestMismatch,
    LayoutMismatch,
    PdserveError,
    PeerLost,
    StaleAttempt,
    StaleEpoch,
    StaleError,
    TransferError,
    TransferTimeout,
)
from pdserve.base.ids import Epoch, RequestId, TransferId
from tests.support.handover import LAYOUT, REQUEST, Pair, blocks, worker_pair


async def hand_over(pair: Pair, source_ids: list[int], target_ids: list[int]) -> Received:
    ticket = await pair.grant(target_ids)
    async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
        await transfer.push(blocks(*source_ids))
        return await transfer.finish([5], pair.receiver.commit)


async def test_blocks_arrive_and_the_request_is_told_once() -> None:
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


async def test_a_prompt_that_the_decode_worker_has_whole_needs_only_the_commit() -> None:
    async with worker_pair() as pair:
        result = await hand_over(pair, [], [])
        assert result.received_bytes == 0
        assert pair.received == [result]


async def test_no_more_than_the_window_is_outstanding() -> None:
    async with worker_pair(max_outstanding_bytes=2 * LAYOUT.block_bytes) as pair:
        ticket = await pair.grant([0, 1, 2, 3, 4, 5])
        stray = replace(ticket, tag_base=ticket.tag_base ^ (1 << 40))  # Nobody receives these.
        async with pair.sender.open(stray, request_id=REQUEST) as transfer:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(transfer.push(blocks(0, 1, 2)), timeout=0.05)
            assert transfer.num_unsent == 4
            assert not transfer.quiet
            pair.receiving._matcher.clear()[1][0].complete()
            pair.sending.disconnect(transfer._peer)
        assert transfer.quiet


async def test_a_commit_that_overtakes_the_blocks_waits_for_them() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0, 1])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0))
            digests = (*transfer._digests[0], transfer._digest(pair.source.blocks[1]))
            commit = signed_commit(ticket, request_id=REQUEST, digests=digests, first_tokens=(9,))
            early = asyncio.ensure_future(pair.receiver.commit(commit))
            await asyncio.sleep(0)
            assert not early.done()
            await transfer.push(blocks(1))
            assert (await early).first_tokens == (9,)


async def test_a_repeated_commit_gets_the_same_answer_and_tells_the_request_nothing_new() -> None:
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


async def test_a_commit_without_the_key_changes_nothing() -> None:
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
        with pytest.raises(StaleError, match="granted to request"):
            await commit(request_id="somebody else")
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
        await pair.receiver.abort(ticket.transfer_id)  # Again, and of something unknown: nothing happens.


async def test_renewing_fences_the_old_ticket_off() -> None:
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


async def test_a_silent_prefill_worker_loses_the_reservation_when_the_lease_ends() -> None:
    async with worker_pair() as pair:
        told = asyncio.Event()

        def on_expired(error: PdserveError) -> None:
            pair.expired.append(error)
            told.set()

        reservation = replace(pair.reservation([0, 1], lease_s=0.05), on_expired=on_expired)
        ticket = await pair.receiver.grant(reservation, attempt=1)
        async with asyncio.timeout(5):
            await told.wait()
        assert [type(error) for error in pair.expired] == [TransferTimeout]
        assert pair.receiver.num_transfers == 0
        with pytest.raises(StaleError):
            await pair.receiver.renew(ticket.transfer_id, attempt=2)


async def test_a_waiting_commit_is_refused_when_the_lease_ends() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0], lease_s=0.05)
        commit = signed_commit(ticket, request_id=REQUEST, digests=(bytes(16),), first_tokens=(1,))
        with pytest.raises(TransferTimeout, match="0 of 1 blocks"):
            async with asyncio.timeout(5):
                await pair.receiver.commit(commit)
        assert pair.received == []


async def test_the_sender_refuses_to_send_after_its_lease() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0, 1], lease_s=0.05)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0))
            await pair.receiver.abort(ticket.transfer_id)
            while transfer._machine.state.value == "sending":
                await transfer._change()
            with pytest.raises(TransferTimeout):
                await transfer.push(blocks(1))
            with pytest.raises(TransferTimeout):
                await transfer.finish([1], pair.receiver.commit)


async def test_an_unanswered_commit_ends_with_the_lease_and_frees_the_blocks() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0], lease_s=0.1)

        async def never(commit: Commit) -> Received:
            return await asyncio.get_running_loop().create_future()

        with pytest.raises(TransferTimeout):
            async with asyncio.timeout(5), pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await transfer.push(blocks(0))
                await transfer.finish([1], never)
        assert transfer.quiet


async def test_a_decode_worker_that_dies_before_the_blocks_costs_one_lease_at_most() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0, 1], lease_s=0.1)
        dead = replace(ticket, tag_base=ticket.tag_base ^ (1 << 40))  # As if it never received.
        with pytest.raises(TransferError):
            async with asyncio.timeout(5), pair.sender.open(dead, request_id=REQUEST) as transfer:
                await transfer.push(blocks(0, 1))
                await transfer.finish([1], pair.receiver.commit)
        assert transfer.quiet


async def test_a_decode_worker_that_is_gone_is_said_to_be_lost() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0])
        await pair.receiving.close()
        with pytest.raises(PeerLost):
            async with pair.sender.open(ticket, request_id=REQUEST):
                pass


async def test_cancelling_the_sending_task_leaves_nothing_outstanding() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0, 1], lease_s=0.2)
        stuck = replace(ticket, tag_base=ticket.tag_base ^ (1 << 40))
        pushed = asyncio.Event()
        transfers = []

        async def serve() -> None:
            async with pair.sender.open(stuck, request_id=REQUEST) as transfer:
                transfers.append(transfer)
                await transfer.push(blocks(0, 1))
                pushed.set()
                await asyncio.get_running_loop().create_future()

        async with asyncio.timeout(5):
            task = asyncio.ensure_future(serve())
            await pushed.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert transfers[0].quiet


async def test_tickets_that_do_not_fit_are_refused_before_anything_is_sent() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0])
        with pytest.raises(LayoutMismatch, match="block_size"):
            async with pair.sender.open(replace(ticket, layout=replace(LAYOUT, block_size=8)), request_id=REQUEST):
                pass
        with pytest.raises(TransferError, match="--transport"):
            async with pair.sender.open(replace(ticket, transport="ucx"), request_id=REQUEST):
                pass


async def test_keeping_the_lease_outlives_it() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0], lease_s=0.3)
        loop = asyncio.get_running_loop()
        until = loop.time() + 0.6
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            while loop.time() < until:
                pair.receiver.keep_lease(ticket.transfer_id)
                transfer.keep_lease()
                await asyncio.sleep(0.05)  # The prompt is being computed.
            await transfer.push(blocks(0))
            await transfer.finish([1], pair.receiver.commit)
        assert len(pair.received) == 1
