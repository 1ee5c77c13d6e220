"""One end of a handover in its own process, which takes commands line by line; run by `test_two_processes`."""

from __future__ import annotations

import numpy as np

from kvtransfer.handover.memory import InPlaceMemory
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import ReceiverIdentity, Reservation
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.ticket import Commit, commit_from_proto, commit_to_proto, ticket_from_proto, ticket_to_proto
from pdserve.base.errors import PdserveError
from pdserve.base.ids import BlockId, RequestId, WorkerId, new_epoch
from pdserve.base.layout import KvLayout
from pdserve.base.shared_memory import SharedMemory
from pdserve.base.tasks import service_group
from pdserve.v1 import decode_pb2
from pdserve.worker.kv_bytes import host_blocks
from tests.integration.kvtransfer.memory import payload_of
from tests.integration.kvtransfer.opening import endpoint_of, open_any
from tests.integration.kvtransfer.processes import CommandLine
from tests.support.handover import push_all

LAYOUT = KvLayout.uniform(model="m", dtype="bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
NUM_BLOCKS = 48
REQUEST = RequestId("r")


class Memory:
    """Blocks that are empty or hold `payload_of` their number."""

    def __init__(self, *, filled: bool) -> None:
        self.shared = SharedMemory(NUM_BLOCKS * LAYOUT.block_bytes)
        self.blocks = self.shared.bytes.reshape(NUM_BLOCKS, -1)
        if filled:
            for block in range(NUM_BLOCKS):
                self.blocks[block] = payload_of(block, LAYOUT.block_bytes)

    def holds_the_prompt(self) -> bool:
        return all(np.array_equal(self.blocks[block], payload_of(block, LAYOUT.block_bytes)) for block in (0, 20, 47))


def in_place(memory: Memory) -> InPlaceMemory:
    return host_blocks.in_place(memory.shared.bytes, LAYOUT, memory.shared)


def reservation(*, lease_s: float) -> Reservation:
    return Reservation(
        request_id=REQUEST,
        block_ids=([BlockId(block) for block in range(NUM_BLOCKS)],),
        first_blocks=(0,),
        lease_s=lease_s,
        on_received=lambda received: None,
        on_expired=lambda error: None,
    )


async def prefill(transport_name: str, commands: CommandLine) -> None:
    """`push TICKET COUNT` sends `COUNT` blocks; `finish` sends the rest and prints the commit, to be delivered."""
    transport, memory = open_any(transport_name), Memory(filled=True)
    endpoint_of(transport, memory.shared)
    sender = Sender(transport=transport, memory=in_place(memory), layout=LAYOUT)
    commands.answer("ready")
    _, ticket_hex, count = await commands.next()
    ticket = ticket_from_proto(decode_pb2.Ticket.FromString(bytes.fromhex(ticket_hex)))

    async def commit(message: Commit) -> str:
        commands.answer(commit_to_proto(message).SerializeToString().hex())
        return (await commands.next())[0]

    async with sender.open(ticket, request_id=REQUEST) as transfer:
        await push_all(transfer, *range(int(count)))
        commands.answer("pushed")
        await commands.next()
        await push_all(transfer, *range(int(count), NUM_BLOCKS))
        await transfer.finish([7], commit)
        commands.answer(f"finished {transfer.stats.sent_blocks}")
    await transport.close()


async def decode(transport_name: str, commands: CommandLine) -> None:
    """`grant LEASE GROUPS` prints a ticket; `commit COMMIT` prints whether the blocks are right."""
    transport, memory = open_any(transport_name), Memory(filled=False)
    await transport.listen()
    async with service_group() as tasks:
        commands.answer("ready")
        _, lease_s, layer_groups = await commands.next()
        identity = ReceiverIdentity(
            worker_id=WorkerId("d"),
            epoch=new_epoch(),
            grpc_address="d:1",
            layout=LAYOUT,
            layer_groups=int(layer_groups),
            data_endpoint=endpoint_of(transport, memory.shared),
        )
        receiver = Receiver(transport=transport, memory=in_place(memory), identity=identity, tasks=tasks)
        ticket = await receiver.grant(reservation(lease_s=float(lease_s)), attempt=1)
        commands.answer(ticket_to_proto(ticket).SerializeToString().hex())
        while command := await commands.next():
            match command:
                case ["commit", commit_hex]:
                    commit = commit_from_proto(decode_pb2.CommitRequest.FromString(bytes.fromhex(commit_hex)))
                    try:
                        await receiver.commit(commit)
                        commands.answer("right" if memory.holds_the_prompt() else "wrong")
                    except PdserveError as error:
                        commands.answer(f"refused {error}")
        await receiver.close()
    await transport.close()


async def main(commands: CommandLine, transport_name: str, role: str) -> None:
    """Plays the role "prefill" or "decode"."""
    await {"prefill": prefill, "decode": decode}[role](transport_name, commands)
