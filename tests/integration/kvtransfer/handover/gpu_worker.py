"""A worker on a GPU in its own process, which takes commands line by line; run by `test_between_gpu_caches`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

if "PDSERVE_TEST_GPU" in os.environ:
    import tests.support.devices  # noqa: F401

import torch

from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import ReceiverIdentity, Reservation
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.staging import StagedMemory
from kvtransfer.handover.ticket import (
    Commit,
    Ticket,
    commit_from_proto,
    commit_to_proto,
    ticket_from_proto,
    ticket_to_proto,
)
from kvtransfer.transport import LocalTransports, Transport, open_transport
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.ids import BlockId, RequestId, WorkerId, new_epoch
from pdserve.base.layout import KvLayout
from pdserve.base.shared_memory import SharedMemory
from pdserve.base.tasks import service_group
from pdserve.engine.gpu_identity import gpu_identity
from pdserve.engine.kv_cache import KvCache
from pdserve.peers.host_identity import own_host_identity
from pdserve.v1 import decode_pb2
from pdserve.worker.kv_bytes.device_blocks import staged_on_device
from pdserve.worker.kv_bytes.device_offers import DeviceOffers
from pdserve.worker.kv_bytes.host_blocks import share_blocks
from pdserve.worker.kv_bytes.staged_offers import StagedOffers
from tests.integration.kvtransfer.opening import socket_directory
from tests.integration.kvtransfer.processes import CommandLine

LAYOUT = KvLayout.uniform(model="m", dtype="bfloat16", block_size=4, num_layers=4, num_kv_heads=2, head_dim=16)
NUM_BLOCKS, LAYER_GROUPS = 6, 2
BLOCKS = [BlockId(block) for block in range(NUM_BLOCKS)]
REQUEST = RequestId("r")
LEASE_S = 60.0
#: Seeds of the contents of decode and prefill workers.
EMPTY, FILLED = 0, 5
_DEVICE = torch.device("cuda", 0)


class GpuCache:
    """A cache on a GPU, whose blocks are offered within the host."""

    def __init__(self, transport: Transport, seed: int, *, reads_gpu: bool = True) -> None:
        """`reads_gpu`: False: it sees no other GPU than its own, which has another name."""
        self.cache = KvCache(LAYOUT, NUM_BLOCKS, _DEVICE, is_shared=True)
        self.cache.tensor.copy_(content(seed))
        torch.cuda.synchronize()
        stage = torch.zeros(2 * LAYOUT.block_bytes, dtype=torch.uint8, device=_DEVICE)
        gpu = gpu_identity(_DEVICE)
        offers = DeviceOffers(self.cache, gpu.uuid)
        offers.staged = StagedOffers(offers, SharedMemory(3 * LAYOUT.block_bytes, is_pinned=True))
        self.memory: StagedMemory = staged_on_device(self.cache, stage, 2, offers)
        share_blocks(self.memory, transport)
        assert isinstance(transport, LocalTransports)
        self.endpoint = DataEndpoint(
            host=own_host_identity(),
            lanes=(),
            local=transport.local_address,
            gpu=gpu.uuid,
            readable_gpus=gpu.readable if reads_gpu else frozenset(),
            pins_host_memory=True,
        )

    def holds(self, seed: int) -> bool:
        """Whether the blocks have this content."""
        return torch.equal(self.cache.tensor.cpu(), content(seed))


def content(seed: int) -> torch.Tensor:
    """What a cache has in the beginning, in host memory."""
    shape = (NUM_BLOCKS, LAYOUT.num_layers, 2, 2, LAYOUT.block_size, 16)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def open_with_local() -> Transport:
    """UCX, with offers between GPUs within the host."""
    return open_transport("ucx", local_sockets=socket_directory(), local_gpu=0)


def reservation() -> Reservation:
    """All blocks."""
    return Reservation(
        request_id=REQUEST,
        block_ids=(BLOCKS,),
        first_blocks=(0,),
        lease_s=LEASE_S,
        on_received=lambda received: None,
        on_expired=lambda error: None,
    )


def ticket_of(text: str) -> Ticket:
    """The ticket of a line."""
    return ticket_from_proto(decode_pb2.Ticket.FromString(bytes.fromhex(text)))


def commit_of(text: str) -> Commit:
    """The commit of a line."""
    return commit_from_proto(decode_pb2.CommitRequest.FromString(bytes.fromhex(text)))


async def prefill(commands: CommandLine) -> None:
    """`open TICKET`, then `push GROUP` for each layer group, `finish`, which prints the commit, and `committed`."""
    transport = open_with_local()
    cache = GpuCache(transport, FILLED)
    sender = Sender(transport=transport, memory=cache.memory, layout=LAYOUT)
    commands.answer("ready")
    _, ticket = await commands.next()

    async def commit(message: Commit) -> str:
        commands.answer(commit_to_proto(message).SerializeToString().hex())
        return (await commands.next())[0]

    async with sender.open(ticket_of(ticket), request_id=REQUEST) as transfer:
        commands.answer("opened")
        while (command := await commands.next())[0] == "push":
            await transfer.push(BLOCKS, group=int(command[1]))
            commands.answer("pushed")
        await transfer.finish([7], commit)
        commands.answer("finished")
        await commands.next()
    await transport.close()


@asynccontextmanager
async def decoding(*, reads_gpu: bool = True) -> AsyncIterator[tuple[GpuCache, Receiver]]:
    """A decode worker. `reads_gpu`: as `GpuCache`."""
    transport = open_with_local()
    await transport.listen()
    cache = GpuCache(transport, EMPTY, reads_gpu=reads_gpu)
    identity = ReceiverIdentity(
        worker_id=WorkerId("d"),
        epoch=new_epoch(),
        grpc_address="d:1",
        layout=LAYOUT,
        layer_groups=LAYER_GROUPS,
        data_endpoint=cache.endpoint,
    )
    async with service_group() as tasks:
        receiver = Receiver(transport=transport, memory=cache.memory, identity=identity, tasks=tasks)
        yield cache, receiver
        await receiver.close()
    await transport.close()


async def decode(commands: CommandLine, *, reads_gpu: bool) -> None:
    """`grant` prints a ticket; `commit COMMIT` prints whether the blocks are right."""
    async with decoding(reads_gpu=reads_gpu) as (cache, receiver):
        commands.answer("ready")
        while command := await commands.next():
            if command[0] == "grant":
                ticket = await receiver.grant(reservation(), attempt=1)
                commands.answer(ticket_to_proto(ticket).SerializeToString().hex())
            else:
                await receiver.commit(commit_of(command[1]))
                commands.answer("right" if cache.holds(FILLED) else "wrong")


async def main(commands: CommandLine, transport_name: str, role: str) -> None:
    """Plays the role "prefill", "decode", or "decode apart", which does not read the other's GPU."""
    await (prefill(commands) if role == "prefill" else decode(commands, reads_gpu=role == "decode"))
