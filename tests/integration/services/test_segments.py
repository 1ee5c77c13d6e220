"""Segments of a transfer that come late, twice, in another order, cut off, altered or never: none becomes a token.

They travel inside the process and over real UCX. Only the full depth has every fault on every wire.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from kvtransfer.transport import Buffer, Operation, Peer, Transport, open_transport
from pdserve.base.errors import PdserveError
from pdserve.v1 import decode_pb2
from tests.integration.services.local_cluster import DEADLINE_S, LocalCluster, RouterRequest, running_cluster
from tests.support.depth import IS_FULL
from tests.unit.model.tiny import save_model

FAULTS = ("twice", "late", "reordered", "truncated", "corrupted", "dropped", "another transfer's")
#: Transport and variables of UCX. In a rendezvous the receiver fetches a segment, by default from the sender's memory.
WIRES: dict[str, tuple[str, dict[str, str]]] = {
    "inproc": ("inproc", {}),
    "ucx": ("ucx", {}),
    "ucx, rendezvous": ("ucx", {"UCX_RNDV_THRESH": "0"}),
    "ucx, tcp": ("ucx", {"UCX_TLS": "tcp"}),
    "ucx, tcp, rendezvous": ("ucx", {"UCX_TLS": "tcp", "UCX_RNDV_THRESH": "0"}),
}
#: What is tested at any depth.
ALWAYS = {("inproc", fault) for fault in FAULTS} | {("ucx, rendezvous", "corrupted"), ("ucx, tcp", "twice")}
REQUESTS = 4
#: Long enough for a handover that nothing disturbs, short enough to wait for the end of one whose segments are lost.
LEASE_S = 0.4


class Unreliable:
    """Does one thing to about every third segment that a transport sends, as a seed decides."""

    def __init__(self, transport: Transport, fault: str) -> None:
        self._send = transport.post_send
        transport.post_send = self._post_send  # type: ignore[method-assign]
        self._fault = fault
        self._random = random.Random(fault)
        self._held: list[tuple[Peer, int, Buffer]] = []
        #: Segments to which something was done.
        self.disturbed = 0

    def _post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        if self._random.random() > 0.35:
            return self._send(peer, tag, buffer)
        self.disturbed += 1
        match self._fault:
            case "twice":
                self._send(peer, tag, np.array(buffer))
                self._send(peer, tag, np.array(buffer))
            case "truncated":
                return self._send(peer, tag, np.array(buffer[: len(buffer) // 2]))
            case "corrupted":
                altered = np.array(buffer)
                altered[self._random.randrange(len(altered))] ^= 1 << self._random.randrange(8)
                return self._send(peer, tag, altered)
            case "another transfer's":
                return self._send(peer, (tag + (1 << 20)) % (1 << 64), buffer)
            case "late" | "reordered" | "dropped":
                self._held.append((peer, tag, np.array(buffer)))
        sent = Operation(tag, buffer)
        sent.complete()
        if self._fault == "reordered" and len(self._held) == 3:
            self.release()
        return sent

    def release(self) -> None:
        """Sends what was held, the last first."""
        for peer, tag, buffer in reversed(self._held):
            self._send(peer, tag, buffer)
        self._held.clear()


async def served(request: RouterRequest, wire: Unreliable) -> dict[int, list[int]]:
    """The request as a router runs it: a failed handover is tried once more, then the decode worker prefills."""
    await request.start()
    ticket = await request.ticket()
    try:
        await request.prefill(ticket)
        return await request.finish()
    except PdserveError:
        pass
    try:
        await request.send(renew_ticket=decode_pb2.RenewTicket(attempt=2))
        ticket = await request.ticket()
        wire.release()  # Late segments come while the next attempt runs.
        request.tokens = {choice: [] for choice in request.tokens}
        await request.prefill(ticket)
    except PdserveError:
        request.cancel()
        return {}
    return await request.finish()


@pytest.mark.parametrize(
    ("wire_name", "fault"), [pair for pair in itertools.product(WIRES, FAULTS) if IS_FULL or pair in ALWAYS]
)
async def test_a_disturbed_segment_never_becomes_a_token_and_never_costs_a_block(
    model: Path, monkeypatch: pytest.MonkeyPatch, wire_name: str, fault: str
) -> None:
    transport_name, variables = WIRES[wire_name]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ours, theirs = open_transport(transport_name), open_transport(transport_name)
    wire = Unreliable(ours, fault)
    async with running_cluster(
        model, prefill_transport=ours, decode_transport=theirs, decode={"lease_s": LEASE_S}
    ) as cluster:
        for number in range(REQUESTS):
            prompt = [(7 * position + number) % 90 + 3 for position in range(45)]
            tokens = await served(cluster.request(prompt), wire)
            assert tokens in ({}, await cluster.local(prompt)), fault
        wire.release()
        assert wire.disturbed >= REQUESTS
        await cluster.all_free()
        metrics = cluster.decode.metrics
        mismatches = metrics.registry.get_sample_value(
            "pdserve_kv_transfers_total", {**metrics.labels(), "outcome": "digest_mismatch"}
        )
        assert bool(mismatches) == (fault == "corrupted")


async def test_a_storm_of_cancellations_leaves_both_workers_serving(model: Path) -> None:
    """Fails if a request that ends while another takes its blocks blocks a queue, or keeps blocks."""
    async with running_cluster(model) as cluster:
        prompts = [[(7 * position + number) % 90 + 3 for position in range(45)] for number in range(24)]
        dice = random.Random(1)
        await asyncio.gather(*(_storm(cluster, prompt, dice.uniform(0, 0.05)) for prompt in prompts))
        await cluster.all_free()
        request = cluster.request(prompts[0])
        async with asyncio.timeout(DEADLINE_S):
            await request.start()
            await request.prefill(await request.ticket())
            assert await request.finish() == await cluster.local(prompts[0])
        await cluster.all_free()


async def _storm(cluster: LocalCluster, prompt: list[int], after_s: float) -> None:
    """A request whose caller leaves after that time, wherever it is then."""
    request = cluster.request(prompt, max_tokens=150)

    async def run() -> None:
        await request.start()
        await request.prefill(await request.ticket())
        await request.finish()

    task = asyncio.create_task(run())
    await asyncio.wait((task,), timeout=after_s)
    task.cancel()
    await asyncio.wait((task,))
    if request._stream is not None:
        request.cancel()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))
