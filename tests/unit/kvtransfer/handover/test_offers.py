"""Within a host, blocks are offered: the receiver copies them, each once, and only while it may."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from kvtransfer.handover import host_offers
from kvtransfer.handover.host_offers import HostOffers
from kvtransfer.handover.ticket import Ticket
from kvtransfer.transport.base import tag_base_of
from kvtransfer.transport.local.incoming_peer import OfferedBlocks
from kvtransfer.transport.local.offer import Offer
from pdserve.base.errors import DigestMismatch, PeerLost, TransferError, TransferTimeout
from tests.support.deadline import DEADLINE_S
from tests.support.handover import LAYOUT, REQUEST, Pair, blocks, push_all, until_idle, worker_pair
from tests.support.inproc_offers import InprocWithOffers

pytestmark = pytest.mark.virtual_time


def offers_of(pair: Pair) -> list[Offer]:
    assert isinstance(pair.sending, InprocWithOffers)
    return pair.sending.offers


@contextmanager
def slow_copies(pair: Pair) -> Iterator[threading.Event]:
    """The receiver's thread is busy until the event is set."""
    memory, may_copy = pair.receiver._memory.offers, threading.Event()
    assert isinstance(memory, HostOffers)
    memory._thread.submit(may_copy.wait)
    try:
        yield may_copy
    finally:
        may_copy.set()


async def turns() -> None:
    """Returns when everything that needs no thread has had its turn. The virtual clock waits for threads."""
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.parametrize("layer_groups", [1, 3, 4])
async def test_blocks_are_offered_and_not_sent(layer_groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that are too small for the C++ kernel, and are copied and digested one by one."""
    async with worker_pair(is_local=True, layer_groups=layer_groups) as pair:
        monkeypatch.delattr(type(pair.sending).__mro__[1], "post_send")
        ticket = await pair.grant([9, 3, 12, 1, 15])
        before = pair.target.blocks.copy()
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await push_all(transfer, 4, 0, 2)
            await push_all(transfer, 7, 5)
            await transfer.finish([5], pair.receiver.commit)
            assert transfer.stats.sent_blocks == 5
        assert np.array_equal(pair.target.blocks[[9, 3, 12, 1, 15]], pair.source.blocks[[4, 0, 2, 7, 5]])
        others = [block for block in range(16) if block not in (9, 3, 12, 1, 15)]
        assert np.array_equal(pair.target.blocks[others], before[others])
        assert [offer.num_messages for offer in offers_of(pair)] == [3] * layer_groups + [2] * layer_groups


async def test_two_offers_of_a_transfer_wait_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostOffers, "run_bytes", (LAYOUT.block_bytes, 2 * LAYOUT.block_bytes))
    async with worker_pair(is_local=True) as pair:
        ticket = await pair.grant([*range(8, 16)])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            with slow_copies(pair):
                pushing = asyncio.create_task(transfer.push(blocks(*range(8))))
                await turns()
                assert [offer.num_messages for offer in offers_of(pair)] == [1, 2]
            await pushing
            await transfer.finish([5], pair.receiver.commit)
        assert [offer.num_messages for offer in offers_of(pair)] == [1, 2, 2, 2, 1]
        assert np.array_equal(pair.target.blocks[8:], pair.source.blocks[:8])


async def test_bytes_that_change_behind_their_digest_are_refused() -> None:
    async with worker_pair(is_local=True) as pair:
        ticket = await pair.grant([8, 9])
        with pytest.raises(DigestMismatch, match="1 of 2 blocks are not what was sent"):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                with slow_copies(pair):
                    await transfer.push(blocks(0, 1))
                    pair.source.blocks[1, 7] ^= 1
                await transfer.finish([5], pair.receiver.commit)
        await pair.receiver.abort(ticket.transfer_id)


async def test_an_abort_withdraws_copies_that_wait_for_others() -> None:
    async with worker_pair(is_local=True) as pair:
        ticket = await pair.grant([8, 9])
        before = pair.target.blocks.copy()
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            with slow_copies(pair):
                await transfer.push(blocks(0))
                await turns()
                await pair.receiver.abort(ticket.transfer_id)
                assert transfer.quiet
            await transfer.push(blocks(1))
            await until_idle()
        assert np.array_equal(pair.target.blocks, before)


async def test_an_offer_whose_copy_is_cancelled_before_its_first_turn_ends() -> None:
    async with worker_pair(is_local=True, layer_groups=2) as pair:
        assert isinstance(pair.receiving, InprocWithOffers)
        ticket, ended = await pair.grant([8, 9]), list[int]()
        blocks = OfferedBlocks(offer_of(ticket), pair.source.shared.bytes, ended.append)
        assert pair.receiving._inboxes[ticket.tag_base].offered(blocks)
        [pull] = pair.receiver._transfers[ticket.transfer_id]._messages._pulls
        pull.cancel()  # As a service does that stops.
        await until_idle()
        assert ended == [ticket.tag_base]


async def test_an_abort_waits_for_the_copy_and_nothing_is_copied_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, may_copy = threading.Event(), threading.Event()
    copy = host_offers._copied

    def slow(*arguments: Any) -> list[bytes]:
        copies.set()
        may_copy.wait()
        return copy(*arguments)

    monkeypatch.setattr(host_offers, "_copied", slow)
    async with worker_pair(is_local=True) as pair:
        ticket = await pair.grant([8, 9])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0))
            await turns()
            assert copies.wait(DEADLINE_S)
            abort = asyncio.create_task(pair.receiver.abort(ticket.transfer_id))
            await turns()
            assert not abort.done()
            may_copy.set()
            await abort
            pair.target.blocks[8:10] = 42
            await transfer.push(blocks(1))
            await until_idle()
            assert transfer.quiet
        assert (pair.target.blocks[8:10] == 42).all()


async def test_a_copy_that_breaks_ends_its_transfer_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> list[bytes]:
        raise MemoryError

    async with worker_pair(is_local=True) as pair:
        ticket, other = await pair.grant([8]), await pair.grant([9])
        with monkeypatch.context() as patched:
            patched.setattr(host_offers, "_copied", broken)
            with pytest.raises(TransferError, match="could not be copied: MemoryError"):
                async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                    await transfer.push(blocks(0))
                    await transfer.finish([5], pair.receiver.commit)
        await pair.receiver.abort(ticket.transfer_id)
        async with pair.sender.open(other, request_id=REQUEST) as transfer:
            await transfer.push(blocks(1))
            await transfer.finish([5], pair.receiver.commit)
        assert np.array_equal(pair.target.blocks[9], pair.source.blocks[1])


async def test_a_transfer_with_offers_loses_nothing_when_connections_between_hosts_are_lost() -> None:
    async with worker_pair(is_local=True) as pair:
        ticket = await pair.grant([8, 9])
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push(blocks(0))
            pair.receiving._matcher.lose(PeerLost("another sender stopped in the middle of a message"))
            await transfer.push(blocks(1))
            await transfer.finish([5], pair.receiver.commit)
        assert np.array_equal(pair.target.blocks[8:10], pair.source.blocks[:2])


async def test_a_lease_that_ends_during_a_copy_lets_the_senders_blocks_go() -> None:
    async with worker_pair(is_local=True) as pair:
        ticket = await pair.grant([8, 9], lease_s=5.0)
        with slow_copies(pair):
            with pytest.raises(TransferTimeout):
                async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                    await transfer.push(blocks(0, 1))
                    await turns()
                    asyncio.get_running_loop()._num_executor_calls = 0  # type: ignore[attr-defined]
                    await transfer.finish([5], pair.receiver.commit)
            assert transfer.quiet
            pair.source.blocks[:2] = 7  # They belong to another prompt.
        await pair.receiver.abort(ticket.transfer_id)
        assert pair.received == []


async def test_a_peer_that_is_gone_is_lost_and_blocks_are_not_offered_in_vain() -> None:
    async with worker_pair(is_local=True) as pair:
        ticket = await pair.grant([8, 9])
        with pytest.raises(PeerLost):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                with slow_copies(pair):
                    await transfer.push(blocks(0))
                    pair.sending.disconnect(transfer._peer)
                    await transfer.push(blocks(1))
        await pair.receiver.abort(ticket.transfer_id)


async def test_a_ticket_with_bundles_of_several_blocks_is_sent() -> None:
    async with worker_pair(is_local=True) as pair:
        ticket = await pair.grant([8])
        assert pair.sender._local_sources(ticket)
        assert pair.sender._local_sources(replace(ticket, bundle_blocks=2)) == []


def offer_of(ticket: Ticket, **changes: object) -> Offer:
    """An offer of the first layer group of two blocks."""
    given = Offer(
        first_tag=ticket.tag_base,
        tag_step=2,
        num_messages=2,
        block_bytes=LAYOUT.block_bytes // 2,
        starts=np.array([0, LAYOUT.block_bytes]),
    )
    if "first_tag" in changes:
        changes["first_tag"] = ticket.tag(cast(int, changes["first_tag"]))
    return replace(given, **changes)  # type: ignore[arg-type]


def is_taken(pair: Pair, offer: Offer) -> bool:
    assert isinstance(pair.receiving, InprocWithOffers)
    blocks = OfferedBlocks(offer, pair.source.shared.bytes, lambda tag: None)
    return pair.receiving._inboxes[tag_base_of(offer.first_tag)].offered(blocks)


@pytest.mark.parametrize(
    "changes",
    [
        {"tag_step": 1},
        {"tag_step": 0},
        {"num_messages": 3, "starts": np.array([0, 512, 1024])},
        {"first_tag": 2},
        {"first_tag": 4, "num_messages": 1, "starts": np.array([0])},
        {"first_tag": (1 << 20) - 1, "num_messages": 1, "starts": np.array([0])},
    ],
)
async def test_offers_of_messages_that_the_ticket_does_not_have_are_dropped(changes: dict[str, object]) -> None:
    """Two blocks of two layer groups are messages 0 to 3."""
    async with worker_pair(is_local=True, layer_groups=2) as pair:
        ticket = await pair.grant([8, 9])
        assert not is_taken(pair, offer_of(ticket, **changes))
        async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
            await push_all(transfer, 0, 1)
            await transfer.finish([5], pair.receiver.commit)
        assert np.array_equal(pair.target.blocks[8:10], pair.source.blocks[:2])


@pytest.mark.parametrize("changes", [{"block_bytes": 100}, {"starts": np.array([0])}, {"starts": np.array([0, 1, 2])}])
async def test_offers_of_other_sizes_end_the_transfer(changes: dict[str, object]) -> None:
    async with worker_pair(is_local=True, layer_groups=2) as pair:
        ticket = await pair.grant([8, 9])
        assert not is_taken(pair, offer_of(ticket, **changes))
        with pytest.raises(TransferError, match="Other blocks were offered"):
            async with pair.sender.open(ticket, request_id=REQUEST) as transfer:
                await push_all(transfer, 0, 1)
                await transfer.finish([5], pair.receiver.commit)
        await pair.receiver.abort(ticket.transfer_id)


async def test_what_was_offered_before_is_not_copied_again() -> None:
    async with worker_pair(is_local=True, layer_groups=2) as pair:
        ticket = await pair.grant([8, 9])
        with slow_copies(pair):
            assert is_taken(pair, offer_of(ticket))
            assert not is_taken(pair, offer_of(ticket))
            assert not is_taken(pair, offer_of(ticket, first_tag=2, num_messages=1, starts=np.array([0])))
        await until_idle()
        assert not is_taken(pair, offer_of(ticket))
        await pair.receiver.abort(ticket.transfer_id)
