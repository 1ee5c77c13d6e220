"""Handovers between two processes: complete ones, and the time left after the last layers are computed.

    python -m benchmarks.gpu.handover FD TRANSPORT MEMORY BLOCKS AT_ONCE ROUNDS DEVICE DIRECTORY LAYOUT

runs the receiving process, which the measuring one starts. Both use the workers' code: the protocol with digests and
commit, over UCX or NCCL with blocks staged in host or device memory, or within the host, from cache to cache or through
host memory that both pin.
"""

from __future__ import annotations

import asyncio
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.transfer import REQUEST, Link
from kvtransfer.handover.memory import BlockMemory
from kvtransfer.handover.receiver import Receiver
from kvtransfer.handover.reservation import ReceiverIdentity, Reservation
from kvtransfer.handover.sender import Sender
from kvtransfer.handover.staging import best_bundle_blocks
from kvtransfer.handover.ticket import (
    Commit,
    Ticket,
    commit_from_proto,
    commit_to_proto,
    ticket_from_proto,
    ticket_to_proto,
)
from kvtransfer.transport import LocalTransports, Transport, open_transport
from kvtransfer.transport.local.socket_directory import SocketDirectory
from kvtransfer.transport.path import DataEndpoint
from pdserve.base.ids import BlockId, WorkerId, new_epoch
from pdserve.base.layout import KvLayout
from pdserve.base.layout_wire import layout_from_record, layout_to_record
from pdserve.base.tasks import service_group
from pdserve.engine.gpu_identity import gpu_identity
from pdserve.engine.kv_cache import KvCache
from pdserve.peers.host_identity import own_host_identity
from pdserve.v1 import decode_pb2
from pdserve.worker.config import GPU_LAYER_GROUPS
from pdserve.worker.kv_bytes.device_blocks import device_block_memory
from pdserve.worker.kv_bytes.host_blocks import block_memory, share_blocks, staged

#: The memory that blocks pass through; LOCAL: none, the receiver copies them from the sender's cache. PINNED: host
#: memory that both pin, as between GPUs that do not read each other.
HOST, DEVICE, LOCAL, PINNED = "host", "device", "local", "pinned"
_WITHIN_HOST = (LOCAL, PINNED)
#: The first rounds connect, compile, and touch memory for the first time.
_WARM_UP_ROUNDS = 2
#: Wait until all groups but the last have arrived, as they would while a model computes.
_SETTLE_S = 0.05
_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Handovers to measure: their blocks, memory and transport."""

    layout: KvLayout
    #: Blocks of each handover.
    num_blocks: int
    rounds: int
    device: str
    memory: str
    transport: str = "ucx"
    #: Device of the receiving process; None: the same device.
    peer_device: str | None = None
    #: Where both processes meet within the host.
    directory: str = ""
    #: Handovers at a time, each of blocks of its own.
    at_once: int = 1

    def to_arguments(self) -> list[str]:
        """Command-line arguments of the peer's case."""
        device = self.peer_device or self.device
        numbers = [str(self.num_blocks), str(self.at_once), str(self.rounds)]
        layout = json.dumps(layout_to_record(self.layout))
        return [self.transport, self.memory, *numbers, device, self.directory, layout]

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> Case:
        """Parses the arguments of `to_arguments`."""
        transport, memory, num_blocks, at_once, rounds, device, directory, layout = arguments
        return cls(
            layout=layout_from_record(layout.encode()),
            num_blocks=int(num_blocks),
            at_once=int(at_once),
            rounds=int(rounds),
            device=device,
            memory=memory,
            transport=transport,
            directory=directory,
        )

    def blocks_of(self, number: int) -> list[BlockId]:
        """The blocks of one of the handovers."""
        return [BlockId(block) for block in range(number * self.num_blocks, (number + 1) * self.num_blocks)]

    def open_transport(self) -> Transport:
        """Opens the transport of this process."""
        if self.memory in _WITHIN_HOST:
            gpu = torch.device(self.device).index or 0
            return open_transport("ucx", local_sockets=SocketDirectory(Path(self.directory)), local_gpu=gpu)
        is_in_gpu = self.memory == DEVICE and self.device != "cpu"
        return open_transport(self.transport, device=self.device if is_in_gpu else None)

    def open_memory(self) -> tuple[KvCache, BlockMemory]:
        """A cache with all blocks, and staging memory for as many."""
        num_blocks, device = self.num_blocks * self.at_once, torch.device(self.device)
        cache = KvCache(self.layout, num_blocks, device, is_shared=self.memory in _WITHIN_HOST)
        bundle_blocks = best_bundle_blocks(self.layout.block_bytes)
        size = -(-num_blocks // bundle_blocks) * bundle_blocks * self.layout.block_bytes
        if self.memory == LOCAL and cache.shared is None:
            raise RuntimeError("this GPU's memory cannot be shared between processes; the log says why")
        if self.memory in _WITHIN_HOST:
            return cache, block_memory(cache, bundle_blocks * self.layout.block_bytes, is_shared=True)
        if self.memory == DEVICE:
            return cache, device_block_memory(cache, size)
        if self.device == "cpu":
            return cache, staged(cache, torch.zeros(size, dtype=torch.uint8))
        return cache, block_memory(cache, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Times of each round, in milliseconds."""

    #: From the first block to the answer of the last commit, with all blocks computed.
    whole_ms: tuple[float, ...]
    #: The same of one handover, if only its last layer group is left to send.
    exposed_ms: tuple[float, ...]


def measure(case: Case, on_rounds: Callable[[], None] = lambda: None) -> Times:
    """Measures a case. Raises `RuntimeError` with the last output of the receiving process when that fails.

    `on_rounds` is called when the first round that counts begins, and when the last of those that send all blocks ends.
    """
    if case.memory in _WITHIN_HOST and not case.directory:
        with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # Paths of sockets are short.
            return measure(replace(case, directory=directory), on_rounds)
    here, there = socket.socketpair()
    command = [sys.executable, "-m", "benchmarks.gpu.handover", str(there.fileno()), *case.to_arguments()]
    with (
        tempfile.TemporaryFile("w+") as output,
        subprocess.Popen(command, pass_fds=[there.fileno()], stderr=output) as child,
    ):
        there.close()
        try:
            return asyncio.run(_within_limit(_send(case, here, on_rounds)))
        except (OSError, asyncio.IncompleteReadError) as error:
            child.kill()
            child.wait()
            output.seek(0)
            lines = output.read().strip().splitlines()
            raise RuntimeError(f"the receiving process ended: {lines[-1] if lines else error!r}") from error
        finally:
            here.close()
            child.kill()


async def _within_limit(work: Awaitable[Times]) -> Times:
    """Bounds the time: a transport on untested hardware may hang."""
    async with asyncio.timeout(_LIMIT_S):
        return await work


async def _send(case: Case, stream: socket.socket, on_rounds: Callable[[], None]) -> Times:
    link = Link(*await asyncio.open_connection(sock=stream))
    cache, memory = case.open_memory()
    cache.tensor.view(torch.uint8).random_(0, 64)
    transport = case.open_transport()
    share_blocks(memory, transport)
    sender = Sender(transport=transport, memory=memory, layout=case.layout)
    answers: dict[bytes, asyncio.Future[None]] = {}

    async def commit(message: Commit) -> None:
        answers[message.transfer_id] = asyncio.get_running_loop().create_future()
        link.write(commit_to_proto(message).SerializeToString())
        await answers[message.transfer_id]

    async def hand_over(number: int, ticket: Ticket, settle_s: float) -> float:
        """Milliseconds from the send of the first group, or with `settle_s` of the last."""
        blocks, started_at = case.blocks_of(number), time.perf_counter()
        async with sender.open(ticket, request_id=REQUEST) as transfer:
            for group in range(ticket.layer_groups - 1):
                await transfer.push(blocks, group=group)
            if settle_s:
                await asyncio.sleep(settle_s)
                started_at = time.perf_counter()
            await transfer.push(blocks, group=ticket.layer_groups - 1)
            await transfer.finish([1], commit)
        return 1e3 * (time.perf_counter() - started_at)

    async def one_round(settle_s: float) -> float:
        """Milliseconds of all handovers, or with `settle_s` those of one."""
        tickets = [ticket_from_proto(decode_pb2.Ticket.FromString(await link.read())) for _ in range(case.at_once)]
        started_at = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            handovers = [group.create_task(hand_over(*each, settle_s)) for each in enumerate(tickets)]
            for _ in tickets:
                answers.pop(await link.read()).set_result(None)
        whole_ms = 1e3 * (time.perf_counter() - started_at)
        return statistics.median(each.result() for each in handovers) if settle_s else whole_ms

    try:
        for _ in range(_WARM_UP_ROUNDS):
            await one_round(0.0)
        on_rounds()
        whole = [await one_round(0.0) for _ in range(case.rounds)]
        on_rounds()
        exposed = [await one_round(_SETTLE_S) for _ in range(_WARM_UP_ROUNDS + case.rounds)]
    finally:
        await transport.close()
        await link.close()
    return Times(whole_ms=tuple(whole), exposed_ms=tuple(exposed[_WARM_UP_ROUNDS:]))


async def _receive(case: Case, stream: socket.socket) -> None:
    link = Link(*await asyncio.open_connection(sock=stream))
    _, memory = case.open_memory()
    transport = case.open_transport()
    share_blocks(memory, transport)
    await transport.listen()
    identity = ReceiverIdentity(
        worker_id=WorkerId("d"),
        epoch=new_epoch(),
        grpc_address="none:1",
        layout=case.layout,
        layer_groups=min(GPU_LAYER_GROUPS, case.layout.num_layers),
        data_endpoint=_endpoint(case, transport),
    )
    async with service_group() as tasks:
        receiver = Receiver(transport=transport, memory=memory, identity=identity, tasks=tasks)
        for attempt in range(2 * (_WARM_UP_ROUNDS + case.rounds)):
            for number in range(case.at_once):
                ticket = await receiver.grant(_reservation(case.blocks_of(number)), attempt=attempt)
                link.write(ticket_to_proto(ticket).SerializeToString())
            async with asyncio.TaskGroup() as group:
                for _ in range(case.at_once):
                    commit = commit_from_proto(decode_pb2.CommitRequest.FromString(await link.read()))
                    group.create_task(_commit(receiver, commit, link))
        await receiver.close()
    await transport.close()
    await link.close()


async def _commit(receiver: Receiver, commit: Commit, link: Link) -> None:
    await receiver.commit(commit)
    link.write(commit.transfer_id)


def _reservation(blocks: list[BlockId]) -> Reservation:
    return Reservation(
        request_id=REQUEST,
        block_ids=(blocks,),
        first_blocks=(0,),
        lease_s=60,
        on_received=lambda received: None,
        on_expired=lambda error: None,
    )


def _endpoint(case: Case, transport: Transport) -> DataEndpoint | None:
    """The receiver's end within the host; None: blocks are sent."""
    if case.memory not in _WITHIN_HOST or not isinstance(transport, LocalTransports):
        return None
    gpu = gpu_identity(torch.device(case.device))
    host, local = own_host_identity(), transport.local_address
    readable = gpu.readable if case.memory == LOCAL else frozenset[str]()
    return DataEndpoint(
        host=host, lanes=(), local=local, gpu=gpu.uuid, readable_gpus=readable, pins_host_memory=bool(gpu.uuid)
    )


if __name__ == "__main__":
    descriptor, *rest = sys.argv[1:]
    asyncio.run(_receive(Case.from_arguments(rest), socket.socket(fileno=int(descriptor))))
