"""Transfers that share small stages and connections: each gets its memory, and none waits for one that waits for it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import numpy as np
import pytest

from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import ReceiverIdentity, Reservation
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.staging import StagedMemory
from kvtransfer.transport import Buffer, Transport
from kvtransfer.transport.torch_distributed import turns
from kvtransfer.transport.torch_distributed.pair import Arrival, Pair
from kvtransfer.transport.torch_distributed.transport import TorchDistributedTransport
from pdserve.base.ids import Epoch, RequestId, WorkerId
from pdserve.base.tasks import ServiceGroup, service_group
from tests.integration.kvtransfer.conftest import OpenTransport
from tests.integration.kvtransfer.opening import BETWEEN_GPUS
from tests.support.deadline import DEADLINE_S
from tests.support.handover import LAYOUT, Memory, blocks, staged

TRANSPORTS = pytest.mark.parametrize("transport_name", ["ucx", "nccl", BETWEEN_GPUS])


class Worker:
    """Sends and receives through one stage."""

    def __init__(self, transport: Transport, tasks: ServiceGroup, *, seed: int, num_frames: int) -> None:
        self.memory = Memory(64, seed)
        self.stage: StagedMemory = staged(self.memory, num_frames)
        identity = ReceiverIdentity(worker_id=WorkerId(f"w{seed}"), epoch=Epoch(1), grpc_address="w:1", layout=LAYOUT)
        self.receiver = Receiver(transport=transport, memory=self.stage, identity=identity, tasks=tasks)
        self.sender = Sender(transport=transport, memory=self.stage, layout=LAYOUT)

    async def send(self, other: Worker, ids: range) -> None:
        """Hands these blocks over, to those with the same numbers."""
        request = RequestId(f"{ids}")
        reservation = Reservation(
            request_id=request,
            block_ids=(blocks(*ids),),
            first_blocks=(0,),
            lease_s=2 * DEADLINE_S,
            on_received=lambda received: None,
            on_expired=lambda error: None,
        )
        ticket = await other.receiver.grant(reservation, attempt=1)
        async with self.sender.open(ticket, request_id=request) as transfer:
            await transfer.push(blocks(*ids))
            await transfer.finish([5], other.receiver.commit)
        assert np.array_equal(other.memory.blocks[ids], self.memory.blocks[ids])


@TRANSPORTS
async def test_transfers_over_one_connection_do_not_take_the_memory_that_the_first_one_waits_for(
    start_transport: OpenTransport,
) -> None:
    """The messages of a pair come in the order of their announcements, over gloo and NCCL."""
    async with asyncio.timeout(DEADLINE_S), service_group() as tasks:
        sender = Worker(start_transport(), tasks, seed=1, num_frames=64)
        receiver = Worker(start_transport(), tasks, seed=2, num_frames=2)
        await sender.send(receiver, range(60, 61))
        await asyncio.gather(*(sender.send(receiver, range(first, first + 4)) for first in range(0, 32, 4)))
        assert receiver.stage.num_free == receiver.stage.max_blocks
        await receiver.receiver.close()


@TRANSPORTS
async def test_workers_that_send_to_each_other_do_not_wait_for_each_other(start_transport: OpenTransport) -> None:
    async with asyncio.timeout(DEADLINE_S), service_group() as tasks:
        transports = start_transport(), start_transport()
        for transport in transports:
            await transport.listen()
        one, other = (Worker(each, tasks, seed=seed, num_frames=4) for seed, each in enumerate(transports))
        there = (one.send(other, range(first, first + 4)) for first in range(0, 32, 4))
        back = (other.send(one, range(first, first + 4)) for first in range(32, 64, 4))
        await asyncio.gather(*there, *back)
        for worker in (one, other):
            assert worker.stage.num_free == worker.stage.max_blocks
            await worker.receiver.close()


@pytest.mark.parametrize("transport_name", ["nccl", BETWEEN_GPUS])
async def test_a_message_that_waits_for_memory_for_long_is_set_aside_and_its_pair_lives(
    start_transport: OpenTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_PATIENCE_S", 0.01)
    async with asyncio.timeout(DEADLINE_S), service_group() as tasks:
        sender = Worker(start_transport(), tasks, seed=1, num_frames=64)
        transport = start_transport()
        assert isinstance(transport, TorchDistributedTransport)
        receiver = Worker(transport, tasks, seed=2, num_frames=2)
        await sender.send(receiver, range(60, 61))
        held = await receiver.stage.lend([blocks(0), blocks(1)])
        [pair] = transport._pairs
        has_landed, landed = asyncio.Event(), transport._landed

        def landing(pair: Pair, arrival: Arrival, job: Future[Buffer]) -> None:
            landed(pair, arrival, job)
            has_landed.set()

        monkeypatch.setattr(transport, "_landed", landing)
        sending = asyncio.gather(*(sender.send(receiver, range(first, first + 2)) for first in range(0, 8, 2)))
        await has_landed.wait()  # The stage is full: it is in memory of the link.
        first = pair.aside
        assert first is not None
        assert first.landed
        for buffer in held:
            receiver.stage.give_back(buffer)
        await sending
        assert not pair.lost
        assert first.receive is not None
        assert receiver.stage.num_free == receiver.stage.max_blocks
        await receiver.receiver.close()
