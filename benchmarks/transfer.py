"""Transfer rate of KV blocks between two processes: complete handovers with digests and commit.

    python -m benchmarks.transfer [--transport ucx] [--guard] [--blocks 250] [--rounds 40] [--block-bytes 368640]
        [--output FILE]

Runs two asyncio processes on this host. In a round, a ticket is received, every block pushed and digested, and the
commit verified. Before each round one process copies as many bytes within its memory. The ratio of the two rates is
comparable between machines, and least affected by other load. `--guard` keeps strangers out of UCX, as in a cluster
with a secret; the first round then has the introduction, without gRPC and seal.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvtransfer.handover.host_offers import HostOffers
from kvtransfer.handover.introduction import (
    Introduction,
    NoCalls,
    answered,
    introduction_from_proto,
    introduction_to_proto,
)
from kvtransfer.handover.memory import InPlaceMemory
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import ReceiverIdentity, Reservation
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.ticket import (
    Commit,
    Ticket,
    commit_from_proto,
    commit_to_proto,
    ticket_from_proto,
    ticket_to_proto,
)
from kvtransfer.transport import GuardedTransport, LocalTransports, Transport, open_transport
from kvtransfer.transport.local.socket_directory import SocketDirectory
from kvtransfer.transport.own_sockets import Connection
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.ids import BlockId, RequestId, WorkerId, new_epoch
from pdserve.base.layout import KvLayout
from pdserve.base.shared_memory import zeros
from pdserve.base.tasks import service_group
from pdserve.peers.host_identity import own_host_identity
from pdserve.v1 import decode_pb2

REQUEST = RequestId("bench")
#: Beginning of an introduction on the link, and the whole answer to it.
INTRODUCES = b"introduces "
#: The first rounds connect, and touch memory for the first time.
WARM_UP_ROUNDS = 3
#: Prefixes of package names to record; ucxx has one per CUDA version.
PACKAGES = ("libucx", "ucxx", "torch", "numpy", "xxhash")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One handover. Rates count the blocks' bytes; processor time is that of the two whole processes."""

    wall_ms: float
    gb_per_s: float
    memcpy_gb_per_s: float
    prefill_cpu_ms: float
    decode_cpu_ms: float


class Memory:
    """Blocks of random bytes, as a KV cache would hold them."""

    def __init__(self, num_blocks: int, layout: KvLayout, seed: int, *, is_shared: bool) -> None:
        self.memory, self.shared = zeros(num_blocks * layout.block_bytes, is_shared=is_shared)
        self.blocks = self.memory.reshape(num_blocks, -1)
        self.blocks[:] = np.random.default_rng(seed).integers(0, 256, self.blocks.shape, np.uint8)


class Link:
    """Length-prefixed messages over a socket, in place of gRPC between real workers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def write(self, data: bytes) -> None:
        self._writer.write(len(data).to_bytes(4, "little") + data)

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def read(self) -> bytes:
        return await self._reader.readexactly(int.from_bytes(await self._reader.readexactly(4), "little"))


def layout_of(block_bytes: int) -> KvLayout:
    return KvLayout.uniform(
        model="bench", dtype="bfloat16", block_size=16, num_layers=1, num_kv_heads=1, head_dim=block_bytes // 64
    )


def opened(args: argparse.Namespace, memory: Memory) -> Transport:
    sockets = SocketDirectory(args.local_sockets) if args.local_sockets else None
    transport = open_transport(args.transport, guarded=args.guard, local_sockets=sockets)
    if isinstance(transport, LocalTransports) and memory.shared is not None:
        transport.share(memory.shared)
    return transport


def memory_of(memory: Memory, layout: KvLayout) -> InPlaceMemory:
    return InPlaceMemory(memory.memory, layout, HostOffers(memory.memory, layout, memory.shared))


async def decode(link: Link, args: argparse.Namespace) -> None:
    layout = layout_of(args.block_bytes)
    memory = Memory(args.blocks, layout, 1, is_shared=args.local_sockets is not None)
    transport = opened(args, memory)
    await transport.listen()
    local = transport.local_address if isinstance(transport, LocalTransports) else None
    identity = ReceiverIdentity(
        worker_id=WorkerId("d"),
        epoch=new_epoch(),
        grpc_address="none:1",
        layout=layout,
        data_endpoint=DataEndpoint(host=own_host_identity(), lanes=(), local=local),
    )
    async with service_group() as tasks:
        receiver = Receiver(transport=transport, memory=memory_of(memory, layout), identity=identity, tasks=tasks)
        for attempt in range(args.rounds + WARM_UP_ROUNDS):
            reservation = Reservation(
                request_id=REQUEST,
                block_ids=([BlockId(block) for block in range(args.blocks)],),
                first_blocks=(0,),
                lease_s=30,
                on_received=lambda received: None,
                on_expired=lambda error: None,
            )
            ticket = await receiver.grant(reservation, attempt=attempt)
            link.write(ticket_to_proto(ticket).SerializeToString())
            message = await link.read()
            while message.startswith(INTRODUCES):
                await answer(transport, message.removeprefix(INTRODUCES))
                link.write(INTRODUCES)
                message = await link.read()
            await receiver.commit(commit_from_proto(decode_pb2.CommitRequest.FromString(message)))
            link.write(str(time.process_time()).encode())
        await link.read()
        await receiver.close()
    await transport.close()


async def answer(transport: Transport, message: bytes) -> None:
    assert isinstance(transport, GuardedTransport)
    introduction = introduction_from_proto(decode_pb2.IntroduceRequest.FromString(message))
    await answered(introduction, transport.guard)


class CallsOver(NoCalls):
    """Introductions over the connection between the two processes."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def introduce(self, ticket: Ticket, introduction: Introduction) -> tuple[Connection, ...]:
        self._link.write(INTRODUCES + introduction_to_proto(introduction).SerializeToString())
        await self._link.read()
        return ()


async def prefill(link: Link, args: argparse.Namespace) -> None:
    layout = layout_of(args.block_bytes)
    memory = Memory(args.blocks, layout, 2, is_shared=args.local_sockets is not None)
    transport = opened(args, memory)

    sender = Sender(transport=transport, memory=memory_of(memory, layout), layout=layout, calls=CallsOver(link))
    copy = np.ones_like(memory.blocks)
    gigabytes = args.blocks * layout.block_bytes / 1e9
    loop = asyncio.get_running_loop()

    async def commit(message: Commit) -> float:
        link.write(commit_to_proto(message).SerializeToString())
        return float(await link.read())

    rounds, decode_cpu_s = [], 0.0
    for _ in range(args.rounds + WARM_UP_ROUNDS):
        ticket = ticket_from_proto(decode_pb2.Ticket.FromString(await link.read()))
        copy_started_at = loop.time()
        for block in range(args.blocks):
            copy[block] = memory.blocks[block]
        started_at, cpu_started_at = loop.time(), time.process_time()
        async with sender.open(ticket, request_id=REQUEST) as transfer:
            await transfer.push([BlockId(block) for block in range(args.blocks)])
            decode_cpu_before, decode_cpu_s = decode_cpu_s, await transfer.finish([1], commit)
        rounds.append(
            Round(
                wall_ms=1e3 * (wall_s := loop.time() - started_at),
                gb_per_s=gigabytes / wall_s,
                memcpy_gb_per_s=gigabytes / (started_at - copy_started_at),
                prefill_cpu_ms=1e3 * (time.process_time() - cpu_started_at),
                decode_cpu_ms=1e3 * (decode_cpu_s - decode_cpu_before),
            )
        )
    link.write(b"bye")
    await transport.close()
    report(rounds, args)


def report(all_rounds: Sequence[Round], args: argparse.Namespace) -> None:
    """Prints a summary; appends all rounds and the environment to the runs in the `--output` file."""
    rounds = all_rounds[WARM_UP_ROUNDS:]
    rates = [each.gb_per_s for each in rounds]
    summary = {
        "transport": args.transport,
        "guard": args.guard,
        "first_round_ms": all_rounds[0].wall_ms,
        "wall_ms_median": statistics.median(each.wall_ms for each in rounds),
        "blocks": args.blocks,
        "block_bytes": args.block_bytes,
        "rounds": len(rounds),
        "gb_per_s_median": statistics.median(rates),
        "gb_per_s_best": max(rates),
        "gb_per_s_worst": min(rates),
        "memcpy_gb_per_s_median": statistics.median(each.memcpy_gb_per_s for each in rounds),
        "ratio_to_memcpy_median": statistics.median(each.gb_per_s / each.memcpy_gb_per_s for each in rounds),
        "prefill_cpu_ms_median": statistics.median(each.prefill_cpu_ms for each in rounds),
        "decode_cpu_ms_median": statistics.median(each.decode_cpu_ms for each in rounds),
    }
    summary = {name: round(value, 2) if isinstance(value, float) else value for name, value in summary.items()}
    print(json.dumps(summary))
    if args.output is not None:
        runs = json.loads(args.output.read_text())["runs"] if args.output.exists() else []
        runs.append(
            {"note": args.note, "machine": machine(), "summary": summary, "rounds": [asdict(each) for each in rounds]}
        )
        args.output.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


def machine() -> dict[str, object]:
    """Hardware and versions of the run."""
    models = {
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    }
    return {
        "cpu": ", ".join(sorted(models)),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {
            each.name: each.version for each in importlib.metadata.distributions() if each.name.startswith(PACKAGES)
        },
    }


async def run(side: socket.socket, args: argparse.Namespace) -> None:
    link = Link(*await asyncio.open_connection(sock=side))
    await (decode(link, args) if args.decode_fd is not None else prefill(link, args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transport", default="ucx")
    parser.add_argument("--guard", action="store_true", help="keep strangers out of UCX")
    parser.add_argument("--local-sockets", type=Path, metavar="DIR", help="send through shared memory, within the host")
    parser.add_argument("--blocks", type=int, default=250)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--block-bytes", type=int, default=368_640)
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file to which the run is appended")
    parser.add_argument("--note", default="", help="description of the run, written into the file")
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
