"""The handover between real processes over real transports, with a SIGKILL half-way."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import ReceiverIdentity
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.ticket import Commit, commit_from_proto, commit_to_proto, ticket_from_proto, ticket_to_proto
from pdserve.base.errors import StaleError, TransferError
from pdserve.base.ids import WorkerId, new_epoch
from pdserve.base.tasks import service_group
from pdserve.v1 import decode_pb2
from tests.integration.kvtransfer.conftest import OpenTransport, StartWorker
from tests.integration.kvtransfer.handover.worker import LAYOUT, NUM_BLOCKS, REQUEST, Memory, in_place, reservation
from tests.integration.kvtransfer.opening import WITH_LOCAL, endpoint_of
from tests.integration.kvtransfer.processes import RemotePeer
from tests.support.deadline import DEADLINE_S
from tests.support.handover import push_all

pytestmark = [
    pytest.mark.parametrize("transport_name", ["ucx", "nccl", WITH_LOCAL]),
    pytest.mark.parametrize("layer_groups", [1, 4]),
]


async def deliver(sender: Sender, decode: RemotePeer, layer_groups: int) -> None:
    """A complete handover to that worker."""
    ticket_hex = await decode.command(f"grant 10 {layer_groups}")

    async def commit(message: Commit) -> str:
        return await decode.command(f"commit {commit_to_proto(message).SerializeToString().hex()}")

    ticket = ticket_from_proto(decode_pb2.Ticket.FromString(bytes.fromhex(ticket_hex)))
    async with sender.open(ticket, request_id=REQUEST) as transfer:
        await push_all(transfer, *range(10))
        await push_all(transfer, *range(10, NUM_BLOCKS))
        assert await transfer.finish([7], commit) == "right"


async def test_a_killed_decode_worker_costs_the_prefill_worker_one_lease(
    start_transport: OpenTransport, start_worker: StartWorker, layer_groups: int
) -> None:
    victim, survivor = await start_worker("decode"), await start_worker("decode")
    transport, memory = start_transport(), Memory(filled=True)
    endpoint_of(transport, memory.shared)
    sender = Sender(transport=transport, memory=in_place(memory), layout=LAYOUT)
    ticket_hex = await victim.command(f"grant 1 {layer_groups}")
    ticket = ticket_from_proto(decode_pb2.Ticket.FromString(bytes.fromhex(ticket_hex)))

    with pytest.raises(TransferError):
        async with sender.open(ticket, request_id=REQUEST) as transfer:
            await push_all(transfer, 0, 1)
            await victim.kill()
            await push_all(transfer, *range(2, NUM_BLOCKS))
            await transfer.finish([7], unanswered)
    assert transfer.quiet
    await deliver(sender, survivor, layer_groups)
    await deliver(sender, await start_worker("decode"), layer_groups)


async def test_a_stopped_decode_worker_costs_one_lease_and_blocks_no_other_transfer(
    start_transport: OpenTransport, start_worker: StartWorker, layer_groups: int
) -> None:
    stopped, survivor = await start_worker("decode"), await start_worker("decode")
    transport, memory = start_transport(), Memory(filled=True)
    endpoint_of(transport, memory.shared)
    sender = Sender(transport=transport, memory=in_place(memory), layout=LAYOUT)
    ticket_hex = await stopped.command(f"grant 1 {layer_groups}")
    ticket = ticket_from_proto(decode_pb2.Ticket.FromString(bytes.fromhex(ticket_hex)))
    with pytest.raises(TransferError):
        async with sender.open(ticket, request_id=REQUEST) as transfer:
            await push_all(transfer, 0, 1)
            os.kill(stopped.pid, signal.SIGSTOP)
            await deliver(sender, survivor, layer_groups)
            await push_all(transfer, *range(2, NUM_BLOCKS))
            await transfer.finish([7], unanswered)
    assert transfer.quiet
    await deliver(sender, await start_worker("decode"), layer_groups)


async def unanswered(message: Commit) -> str:
    answer: str = await asyncio.get_running_loop().create_future()
    return answer


async def test_another_prefill_worker_fills_the_same_blocks_after_a_kill(
    start_transport: OpenTransport, start_worker: StartWorker, layer_groups: int
) -> None:
    victim, other = await start_worker("prefill"), await start_worker("prefill")
    memory, transport = Memory(filled=False), start_transport()
    await transport.listen()
    identity = ReceiverIdentity(
        worker_id=WorkerId("d"),
        epoch=new_epoch(),
        grpc_address="d:1",
        layout=LAYOUT,
        layer_groups=layer_groups,
        data_endpoint=endpoint_of(transport, memory.shared),
    )
    async with service_group() as tasks:
        receiver = Receiver(transport=transport, memory=in_place(memory), identity=identity, tasks=tasks)
        ticket = await receiver.grant(reservation(lease_s=30), attempt=1)
        assert await victim.command(f"push {ticket_to_proto(ticket).SerializeToString().hex()} 20") == "pushed"
        victim.say("finish")
        await victim.kill()

        fresh = await receiver.renew(ticket.transfer_id, attempt=2)
        memory.blocks[:] = 0
        assert await other.command(f"push {ticket_to_proto(fresh).SerializeToString().hex()} 5") == "pushed"
        commit_hex = await other.command("finish")
        commit = commit_from_proto(decode_pb2.CommitRequest.FromString(bytes.fromhex(commit_hex)))
        async with asyncio.timeout(DEADLINE_S):
            received = await receiver.commit(commit)
        assert await other.command("committed") == f"finished {NUM_BLOCKS}"
        assert received.first_tokens == (7,)
        assert memory.holds_the_prompt()
        assert receiver.num_transfers == 0
        with pytest.raises(StaleError):
            await receiver.renew(fresh.transfer_id, attempt=3)
        await receiver.close()
