"""A draining prefill worker holds its blocks until the decode worker has committed them, and takes nothing new.

A draining decode worker ends in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from decode_svc.config import DecodeConfig
from decode_svc.service import DecodeService
from kvtransfer.transport import Buffer, Operation, Peer
from kvtransfer.transport.inproc import InprocTransport
from pdserve.base.errors import Draining
from pdserve.worker.serve.worker import Worker
from tests.integration.services.local_cluster import DEADLINE_S, LEASE_S, running_cluster, running_worker
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]


class Slow(InprocTransport):
    """Sends nothing until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.has_sent = asyncio.Event()
        self._held: list[Callable[[], None]] = []
        self._released = False

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        if self._released:
            return super().post_send(peer, tag, buffer)
        held = Operation(tag, buffer)

        def send() -> None:
            sent = super(Slow, self).post_send(peer, tag, buffer)
            sent.add_done_callback(lambda _: held.complete())

        self._held.append(send)
        self.has_sent.set()
        return held

    def release(self) -> None:
        """Sends what was held, and from now on at once."""
        self._released = True
        for send in self._held:
            send()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


async def test_a_draining_prefill_worker_ends_when_its_handovers_have(model: Path) -> None:
    wire = Slow()
    async with running_cluster(model, prefill_transport=wire, decode={"lease_s": LEASE_S}) as cluster:
        local = await cluster.local(PROMPT)
        request, later = cluster.request(PROMPT), cluster.request(PROMPT)
        await request.start()
        ticket = await request.ticket()
        prefilling = asyncio.create_task(request.prefill(ticket, keeps_lease=True))
        async with asyncio.timeout(DEADLINE_S):
            await wire.has_sent.wait()
            cluster.prefill.calls.drain()
            drained = asyncio.create_task(cluster.prefill.calls.wait_idle())
            with pytest.raises(Draining):
                await later.prefill(None)
            held = await cluster.prefill.run(lambda: cluster.prefill.model.pool.num_free)
            assert held < cluster.prefill.model.pool.num_blocks
            assert not drained.done()
            wire.release()
            await prefilling
            await drained
        assert await request.finish() == local
        await cluster.all_free()


async def test_a_draining_decode_worker_ends_in_order_while_it_looks_for_what_could_leave(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended with exit code 1 when its step loop ended between two looks."""
    monkeypatch.setattr("decode_svc.migration.drain._CHECK_S", 0.0)
    config = DecodeConfig(model=str(model), redis_url="", block_size=4, kv_cache_memory=64 * 1024, threads=1)
    services: list[DecodeService] = []

    def build(worker: Worker) -> DecodeService:
        services.append(DecodeService(worker, config))
        return services[0]

    async with running_worker(config, "decode", InprocTransport(), build) as (worker, _, _):
        services[0].drain(within_s=60.0)
        [drain] = [task for task in asyncio.all_tasks() if task.get_name() == "drain"]
        await asyncio.to_thread(worker.step_loop.stop)
        await drain
