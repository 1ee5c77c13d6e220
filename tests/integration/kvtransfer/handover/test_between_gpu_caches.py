"""Blocks go from cache to cache of two processes on a GPU, or through host memory that both have pinned.

A SIGKILL leaves no mapping and no wrong byte.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
import torch

from tests.support.devices import gpu_only

pytest.importorskip("triton")

from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.ticket import Commit, Ticket, commit_to_proto, ticket_to_proto
from pdserve.base import gpu_memory
from pdserve.base.errors import PeerLost, StaleError, TransferError
from pdserve.base.gpu_memory import GpuDriver
from pdserve.worker.kv_bytes.device_launches import DeviceLaunches, Launch
from tests.integration.kvtransfer.handover.gpu_worker import (
    BLOCKS,
    FILLED,
    LAYER_GROUPS,
    LAYOUT,
    REQUEST,
    GpuCache,
    commit_of,
    decoding,
    open_with_local,
    reservation,
    ticket_of,
)
from tests.integration.kvtransfer.processes import RemotePeer
from tests.support.deadline import DEADLINE_S

pytestmark = [*gpu_only, pytest.mark.parametrize("transport_name", ["on a GPU"])]


class Mappings:
    """A GPU's driver, and what this process has mapped, or mapped and pinned, of others."""

    def __init__(self, driver: GpuDriver) -> None:
        self._driver = driver
        self._addresses: set[int] = set()
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self.allocate, self.device_of = driver.allocate, driver.device_of

    @property
    def count(self) -> int:
        return len(self._addresses)

    def map(self, device: int, file: int, num_bytes: int) -> int:
        address = self._driver.map(device, file, num_bytes)
        self._addresses.add(address)
        return address

    def unmap(self, device: int, address: int, num_bytes: int) -> None:
        self._driver.unmap(device, address, num_bytes)
        self._let_go(address)

    def pin(self, device: int, address: int, num_bytes: int, *, is_read_only: bool) -> int:
        pinned = self._driver.pin(device, address, num_bytes, is_read_only=is_read_only)
        if is_read_only:  # Else it is this process's own.
            self._addresses.add(address)
        return pinned

    def unpin(self, device: int, address: int) -> None:
        self._driver.unpin(device, address)
        self._let_go(address)

    async def none_left(self) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self._addresses:
                self._changed.clear()
                await self._changed.wait()

    def _let_go(self, address: int) -> None:
        if address in self._addresses:  # Else it was this process's own.
            self._addresses.remove(address)
            with suppress(RuntimeError):  # The test has failed, and its loop is closed.
                self._loop.call_soon_threadsafe(self._changed.set)


@pytest.fixture
async def mappings(monkeypatch: pytest.MonkeyPatch) -> Mappings:
    found = Mappings(gpu_memory.open_driver())
    monkeypatch.setattr(gpu_memory, "open_driver", lambda: found)
    return found


StartWorker = Callable[[str], Awaitable[RemotePeer]]


@pytest.fixture
def start(start_process: Callable[..., Awaitable[RemotePeer]]) -> StartWorker:
    async def started(role: str) -> RemotePeer:
        worker = await start_process("handover.gpu_worker", role)
        assert await worker.answer() == "ready"
        return worker

    return started


async def opened(worker: RemotePeer, ticket: Ticket) -> None:
    assert await worker.command(f"open {ticket_to_proto(ticket).SerializeToString().hex()}") == "opened"


async def hand_over(worker: RemotePeer, ticket: Ticket, receiver: Receiver) -> None:
    await opened(worker, ticket)
    for group in range(LAYER_GROUPS):
        assert await worker.command(f"push {group}") == "pushed"
    await receiver.commit(commit_of(await worker.command("finish")))
    assert await worker.command("committed") == "finished"


either_way = pytest.mark.parametrize("reads_gpu", [True, False])


@either_way
async def test_blocks_arrive_and_are_mapped_until_the_sender_has_gone(
    start: StartWorker, mappings: Mappings, reads_gpu: bool
) -> None:
    async with decoding(reads_gpu=reads_gpu) as (cache, receiver):
        worker = await start("prefill")
        await hand_over(worker, await receiver.grant(reservation(), attempt=1), receiver)
        assert cache.holds(FILLED)
        assert mappings.count == 1
        worker.say("end")
        await mappings.none_left()


@either_way
@pytest.mark.parametrize("point", ["opened", "first group", "in a copy", "all groups", "commit sent"])
async def test_after_a_kill_of_a_prefill_worker_another_one_fills_the_blocks(
    start: StartWorker, mappings: Mappings, point: str, reads_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_copying, may_end = asyncio.Event(), asyncio.Event()
    wait_for = DeviceLaunches.wait_for

    async def held(self: DeviceLaunches, launch: Launch) -> list[bytes]:
        is_copying.set()
        await may_end.wait()
        return await wait_for(self, launch)

    async with decoding(reads_gpu=reads_gpu) as (cache, receiver):
        victim, other = await start("prefill"), await start("prefill")
        ticket = await receiver.grant(reservation(), attempt=1)
        await opened(victim, ticket)
        if point == "in a copy":
            monkeypatch.setattr(DeviceLaunches, "wait_for", held)
        for group in range({"opened": 0, "first group": 1, "in a copy": 1}.get(point, LAYER_GROUPS)):
            assert await victim.command(f"push {group}") == "pushed"
        commit = await victim.command("finish") if point == "commit sent" else None
        if point == "in a copy":
            await is_copying.wait()
        await victim.kill()
        if point == "in a copy":
            renewing = asyncio.create_task(receiver.renew(ticket.transfer_id, attempt=2))
            await asyncio.sleep(0)
            assert mappings.count == 1  # The GPU may still read the memory.
            assert not renewing.done()
            may_end.set()
            ticket = await renewing
        await mappings.none_left()
        if commit is not None:  # It arrives behind the kill.
            await receiver.commit(commit_of(commit))
            with pytest.raises(StaleError):
                await receiver.renew(ticket.transfer_id, attempt=2)
        else:
            cache.cache.tensor.zero_()
            torch.cuda.synchronize()
            if point != "in a copy":
                ticket = await receiver.renew(ticket.transfer_id, attempt=2)
            await hand_over(other, ticket, receiver)
        assert cache.holds(FILLED)


@pytest.mark.parametrize("role", ["decode", "decode apart"])
@pytest.mark.parametrize("num_groups", range(LAYER_GROUPS))
async def test_after_a_kill_of_a_decode_worker_nothing_reads_the_blocks_and_others_are_served(
    start: StartWorker, mappings: Mappings, role: str, num_groups: int
) -> None:
    victim, other = await start(role), await start(role)
    transport = open_with_local()
    sender = Sender(transport=transport, memory=GpuCache(transport, FILLED).memory, layout=LAYOUT)

    async def unanswered(commit: Commit) -> str:
        answer: str = await asyncio.get_running_loop().create_future()
        return answer

    with pytest.raises(TransferError):
        async with sender.open(ticket_of(await victim.command("grant")), request_id=REQUEST) as transfer:
            for group in range(LAYER_GROUPS):
                if group == num_groups:
                    await victim.kill()
                await transfer.push(BLOCKS, group=group)
            async with asyncio.timeout(DEADLINE_S):
                await transfer.finish([7], unanswered)
    assert transfer.quiet
    await require_served(sender, other)
    await transport.close()


@pytest.mark.parametrize("role", ["decode", "decode apart"])
async def test_after_a_kill_of_a_decode_worker_that_was_sent_everything_nothing_reads_the_blocks(
    start: StartWorker, mappings: Mappings, role: str
) -> None:
    """It may have taken all blocks by then, and nothing but the call of the commit notices: gRPC ends it."""
    victim, other = await start(role), await start(role)
    transport = open_with_local()
    sender = Sender(transport=transport, memory=GpuCache(transport, FILLED).memory, layout=LAYOUT)

    async def unanswered(commit: Commit) -> str:
        await victim.kill()
        raise PeerLost("The call of the commit ended.")

    async with sender.open(ticket_of(await victim.command("grant")), request_id=REQUEST) as transfer:
        for group in range(LAYER_GROUPS):
            await transfer.push(BLOCKS, group=group)
        with pytest.raises(PeerLost):
            await transfer.finish([7], unanswered)
    assert transfer.quiet
    await require_served(sender, other)
    await transport.close()


async def require_served(sender: Sender, worker: RemotePeer) -> None:
    """The worker gets the right blocks."""

    async def commit(message: Commit) -> str:
        return await worker.command(f"commit {commit_to_proto(message).SerializeToString().hex()}")

    async with sender.open(ticket_of(await worker.command("grant")), request_id=REQUEST) as transfer:
        for group in range(LAYER_GROUPS):
            await transfer.push(BLOCKS, group=group)
        assert await transfer.finish([7], commit) == "right"
