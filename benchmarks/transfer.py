"""How fast KV blocks get from one process to another: whole handovers, digests and commit included.

    python -m benchmarks.transfer [--transport ucx] [--blocks 250] [--rounds 12] [--block-bytes 368640]

Two asyncio processes on this host. A round is: ticket received, every block pushed and digested, commit verified.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys

import numpy as np

from kvtransfer.receiver import Receiver, ReceiverIdentity, Reservation
from kvtransfer.sender import Sender
from kvtransfer.ticket import Commit, commit_from_proto, commit_to_proto, ticket_from_proto, ticket_to_proto
from kvtransfer.transport import Buffer, open_transport
from pdserve.base.ids import BlockId, RequestId, WorkerId, new_epoch
from pdserve.base.layout import KvLayout
from pdserve.base.tasks import service_group
from pdserve.v1 import decode_pb2

REQUEST = RequestId("bench")


class Memory:
    """Blocks of random bytes, as a KV cache would hold them."""

    def __init__(self, num_blocks: int, layout: KvLayout, seed: int) -> None:
        self.blocks = np.random.default_rng(seed).integers(0, 256, (num_blocks, layout.block_bytes), np.uint8)

    def block_bytes_view(self, block_id: BlockId) -> Buffer:
        view: Buffer = self.blocks[block_id]
        return view


class Link:
    """Length-prefixed messages over a socket: what gRPC does between real workers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def write(self, data: bytes) -> None:
        self._writer.write(len(data).to_bytes(4, "little") + data)

    async def read(self) -> bytes:
        return await self._reader.readexactly(int.from_bytes(await self._reader.readexactly(4), "little"))


def layout_of(block_bytes: int) -> KvLayout:
    return KvLayout(
        model="bench", dtype="bfloat16", block_size=16, num_layers=1, num_kv_heads=1, head_dim=block_bytes // 64
    )


async def decode(link: Link, args: argparse.Namespace) -> None:
    transport, layout = open_transport(args.transport), layout_of(args.block_bytes)
    identity = ReceiverIdentity(worker_id=WorkerId("d"), epoch=new_epoch(), grpc_address="-", layout=layout)
    async with service_group() as tasks:
        receiver = Receiver(transport=transport, memory=Memory(args.blocks, layout, 1), identity=identity, tasks=tasks)
        for attempt in range(args.rounds):
            reservation = Reservation(
                request_id=REQUEST,
                block_ids=[BlockId(block) for block in range(args.blocks)],
                first_block=0,
                lease_s=30,
                on_received=lambda received: None,
                on_expired=lambda error: None,
            )
            ticket = await receiver.grant(reservation, attempt=attempt)
            link.write(ticket_to_proto(ticket).SerializeToString())
            await receiver.commit(commit_from_proto(decode_pb2.CommitRequest.FromString(await link.read())))
            link.write(b"ok")
        await link.read()
        await receiver.close()
    await transport.close()


async def prefill(link: Link, args: argparse.Namespace) -> None:
    transport, layout = open_transport(args.transport), layout_of(args.block_bytes)
    sender = Sender(transport=transport, memory=Memory(args.blocks, layout, 2), layout=layout)
    loop = asyncio.get_running_loop()

    async def commit(message: Commit) -> bytes:
        link.write(commit_to_proto(message).SerializeToString())
        return await link.read()

    rates = []
    for _ in range(args.rounds):
        ticket = ticket_from_proto(decode_pb2.Ticket.FromString(await link.read()))
        began = loop.time()
        async with sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push([BlockId(block) for block in range(args.blocks)])
            await transfer.finish([1], commit)
        rates.append(args.blocks * layout.block_bytes / (loop.time() - began) / 1e9)
    link.write(b"bye")
    await transport.close()
    steady = rates[2:] or rates  # The first touches every page and connects.
    result = {
        "transport": args.transport,
        "blocks": args.blocks,
        "block_bytes": layout.block_bytes,
        "gb_per_s_median": round(statistics.median(steady), 2),
        "gb_per_s_best": round(max(steady), 2),
        "gb_per_s_worst": round(min(steady), 2),
        "rounds": len(steady),
    }
    print(json.dumps(result))


async def run(side: socket.socket, args: argparse.Namespace) -> None:
    link = Link(*await asyncio.open_connection(sock=side))
    await (decode(link, args) if args.decode_fd is not None else prefill(link, args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--blocks", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block-bytes", type=int, default=368_640)
    parser.add_argument("--decode-fd", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.decode_fd is not None:
        asyncio.run(run(socket.socket(fileno=args.decode_fd), args))
        return
    here, there = socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.transfer", *sys.argv[1:], "--decode-fd", str(there.fileno())]
    with subprocess.Popen(command, pass_fds=[there.fileno()]) as child:
        there.close()
        asyncio.run(run(here, args))
        child.wait(timeout=30)


if __name__ == "__main__":
    main()
