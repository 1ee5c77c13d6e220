"""Every wait of a handover ends with the lease, on both sides, and progress renews the lease. On virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from kvtransfer.handover.reservation import Received
from kvtransfer.handover.send_machine import ABORTED_S
from kvtransfer.handover.ticket import Commit, signed_commit
from pdserve.base.errors import DigestMismatch, StaleError, TransferTimeout
from tests.support.handover import REQUEST, blocks, not_received, worker_pair

pytestmark = pytest.mark.virtual_time
LEASE_S = 20.0


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_a_silent_prefill_worker_loses_the_reservation_when_the_lease_ends() -> None:
    async with worker_pair() as pair:
        expired = asyncio.get_running_loop().create_future()
        reservation = replace(pair.reservation([0, 1], lease_s=LEASE_S), on_expired=expired.set_result)
        ticket = await pair.receiver.grant(reservation, attempt=1)
        assert isinstance(await expired, TransferTimeout)
        assert now() == LEASE_S
        assert pair.receiver.num_transfers == 0
        with pytest.raises(StaleError):
            await pair.receiver.renew(ticket.transfer_id, attempt=2)


async def test_a_waiting_commit_is_refused_when_the_lease_ends() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0], lease_s=LEASE_S)
        commit = signed_commit(ticket, request_id=REQUEST, digests=(bytes(16),), first_tokens=(1,))
        with pytest.raises(TransferTimeout, match="0 of 1 blocks"):
            await pair.receiver.commit(commit)
        assert now() == LEASE_S
        assert pair.received == []


async def test_a_commit_is_answered_again_for_one_more_lease() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([], lease_s=LEASE_S)
        commit = signed_commit(ticket, request_id=REQUEST, digests=(), first_tokens=(1,))
        first = await pair.receiver.commit(commit)
        await asyncio.sleep(LEASE_S - 1)
        assert await pair.receiver.commit(commit) == first
        await asyncio.sleep(2)
        with pytest.raises(StaleError, match="no such transfer"):
            await pair.receiver.commit(commit)


async def test_the_class_of_a_sender_is_that_of_the_commit_that_was_verified() -> None:
    """Fails when a commit is noted before its MAC is checked."""
    async with worker_pair() as pair:
        ticket = await pair.grant([], lease_s=LEASE_S)
        commit = replace(
            signed_commit(ticket, request_id=REQUEST, digests=(), first_tokens=(1,)), numerics_class="cpu/avx2"
        )
        with pytest.raises(DigestMismatch):
            await pair.receiver.commit(replace(commit, mac=bytes(16), numerics_class="a stranger's"))
        assert (await pair.receiver.commit(commit)).numerics_class == "cpu/avx2"


async def test_the_sender_refuses_to_send_after_its_lease() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0, 1], lease_s=LEASE_S)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0))
            await asyncio.sleep(2 * LEASE_S)
            with pytest.raises(TransferTimeout, match="1 of 2 blocks had arrived"):
                await transfer.push(blocks(1))
            with pytest.raises(TransferTimeout):
                await transfer.finish([1], pair.receiver.commit)


async def test_an_unanswered_commit_ends_with_the_lease_and_frees_the_blocks() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0], lease_s=LEASE_S)

        async def never(commit: Commit) -> Received:
            return await asyncio.get_running_loop().create_future()

        with pytest.raises(TransferTimeout, match="did not answer the commit"):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await transfer.push(blocks(0))
                await transfer.finish([1], never)
        assert transfer.quiet
        assert now() == LEASE_S


async def test_a_decode_worker_that_never_reads_costs_one_lease() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0, 1], lease_s=LEASE_S)
        with pytest.raises(TransferTimeout, match="0 of 2 blocks had arrived"):
            async with pair.sender.open(not_received(ticket), request_id=REQUEST) as transfer:
                await transfer.push(blocks(0, 1))
                await transfer.finish([1], pair.receiver.commit)
        assert transfer.quiet
        assert now() == LEASE_S


async def test_a_cancelled_sender_leaves_soon_with_nothing_outstanding() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0, 1], lease_s=LEASE_S)
        pushed = asyncio.Event()
        transfers = []

        async def serve() -> None:
            async with pair.sender.open(not_received(ticket), request_id=REQUEST) as transfer:
                transfers.append(transfer)
                await transfer.push(blocks(0, 1))
                pushed.set()
                await asyncio.get_running_loop().create_future()

        task = asyncio.ensure_future(serve())
        await pushed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transfers[0].quiet
        assert now() == ABORTED_S


async def test_a_kept_lease_does_not_end() -> None:
    async with worker_pair() as pair:
        ticket = await pair.grant([0], lease_s=LEASE_S)
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            for _ in range(5):
                await asyncio.sleep(0.9 * LEASE_S)  # The prompt is being computed.
                pair.receiver.keep_lease(ticket.transfer_id)
                transfer.keep_lease()
            await transfer.push(blocks(0))
            await transfer.finish([1], pair.receiver.commit)
        assert len(pair.received) == 1
