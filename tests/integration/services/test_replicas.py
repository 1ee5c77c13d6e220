"""Blocks of a running request are copied to another decode worker, which goes on without computing them again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from decode_svc.replicas import Replicas
from pdserve.base.errors import PeerRefused, RequestError, StaleError
from pdserve.base.rpc import mapped_rpc_errors, open_channel
from pdserve.base.seals import Purpose
from pdserve.base.wire import sampling_to_wire
from pdserve.v1 import decode_pb2, decode_pb2_grpc
from pdserve.worker.serve.worker import Worker
from tests.integration.services.local_cluster import (
    ALWAYS_LOCAL,
    DEADLINE_S,
    LocalCluster,
    RouterRequest,
    hold_steps,
    running_cluster,
)
from tests.integration.services.test_roles import change
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]
TOKENS = 40
#: Tokens of a request when its worker is lost.
SEEN = 21
SETTINGS = {"kv_cache_memory": 1 << 20, "replication_interval_ms": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


def noted_arrivals(monkeypatch: pytest.MonkeyPatch) -> asyncio.Queue[int]:
    """Number of blocks of each batch of copies that arrives."""
    loop, queue, arrived = asyncio.get_running_loop(), asyncio.Queue[int](), Replicas.arrived

    def noted(replicas: Replicas, name: Any) -> None:
        count = len(replicas._arriving[name].blocks)
        arrived(replicas, name)
        loop.call_soon_threadsafe(queue.put_nowait, count)

    monkeypatch.setattr(Replicas, "arrived", noted)
    return queue


def named(worker: Worker, address: str) -> decode_pb2.ReplicateTo:
    return decode_pb2.ReplicateTo(worker_id="other", epoch=worker.epoch, grpc_address=address)


async def _seen(request: RouterRequest, count: int) -> None:
    while any(len(tokens) < count for tokens in request.tokens.values()):
        for choice in (await request.event()).tokens.choices:
            request.take(choice)


async def _continued(cluster: LocalCluster, request: RouterRequest) -> dict[int, list[int]]:
    """All tokens of the request, which goes on at the other worker."""
    again = cluster.request(request.prompt, **_params(request))
    again.tokens = {choice: list(tokens) for choice, tokens in request.tokens.items()}
    start = decode_pb2.DecodeStart(
        ref=again.ref(),
        prompt_token_ids=again.prompt,
        sampling=sampling_to_wire(again.params),
        local_prefill_threshold=ALWAYS_LOCAL,
        output=[
            decode_pb2.ChoiceOutput(choice_index=choice, token_ids=tokens) for choice, tokens in again.tokens.items()
        ],
    )
    await again.send(start=cluster.seals.seal(Purpose.START, cluster.decode.seal_name, start))
    return await again.finish()


def _params(request: RouterRequest) -> dict[str, Any]:
    params = request.params
    return {"n": params.n, "temperature": params.temperature, "max_tokens": params.max_tokens, "seed": params.seed}


@pytest.mark.parametrize("params", [{}, {"n": 2, "temperature": 0.8}], ids=["greedy", "sampled"])
async def test_the_other_worker_goes_on_with_the_copies(
    model: Path, monkeypatch: pytest.MonkeyPatch, params: dict[str, Any]
) -> None:
    """Fails when copies are of other tokens, or when the other worker computes what it has."""
    arrivals = noted_arrivals(monkeypatch)
    async with running_cluster(model, decode=SETTINGS, prefill=SETTINGS, have_roles=True) as cluster:
        expected = await cluster.local(PROMPT, max_tokens=TOKENS, **params)
        hold_steps(monkeypatch, after=SEEN, until="check_integrity")
        request = cluster.request(PROMPT, max_tokens=TOKENS, **params)
        await request.start(local_prefill_threshold=ALWAYS_LOCAL)
        await _seen(request, SEEN - 1)
        await change(cluster.prefill_channel, "decode")
        other = cluster.with_roles_swapped()
        await request.send(replicate_to=named(cluster.prefill, cluster.prefill_address))
        async with asyncio.timeout(DEADLINE_S):
            count = await arrivals.get()
        choices = len(request.tokens)
        num_prompt = len(PROMPT) // 4
        assert count >= num_prompt + choices * ((len(PROMPT) + SEEN - 2) // 4 - num_prompt)
        request.cancel()
        await _resume_steps(cluster)
        assert await _continued(other, request) == expected
        used = await _used(cluster.prefill)
        assert used >= choices * ((len(PROMPT) + SEEN - 2) // 4 - num_prompt)
        await cluster.all_free()


async def _resume_steps(cluster: LocalCluster) -> None:
    scheduler: Any = cluster.decode._scheduler
    await cluster.decode.run(scheduler._decode.check_integrity)


async def _used(worker: Worker) -> float:
    return sum(
        sample.value
        for family in worker.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "pdserve_replica_blocks_used_total"
    )


async def test_another_worker_is_wanted_when_one_cannot_be_reached(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrivals = noted_arrivals(monkeypatch)
    monkeypatch.setattr("decode_svc.replication._AGAIN_S", 0.0)
    async with running_cluster(model, decode=SETTINGS, prefill=SETTINGS, have_roles=True) as cluster:
        hold_steps(monkeypatch, after=SEEN, until="check_integrity")
        request = cluster.request(PROMPT, max_tokens=TOKENS)
        await request.start(local_prefill_threshold=ALWAYS_LOCAL)
        assert await _wanted(request, 0)
        lost = decode_pb2.ReplicateTo(worker_id="lost", epoch=77, grpc_address="127.0.0.1:1")
        await request.send(replicate_to=lost)
        assert await _wanted(request, 77)
        await request.send(replicate_to=named(cluster.prefill, cluster.prefill_address))
        async with asyncio.timeout(DEADLINE_S):
            assert await arrivals.get() > 0
        request.cancel()
        await _resume_steps(cluster)
        await cluster.all_free()


async def _wanted(request: RouterRequest, failed_epoch: int) -> bool:
    """Reads events until the worker wants to know where to copy blocks, after this one has failed it."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            event = await request.event()
            if event.HasField("replica_wanted") and event.replica_wanted.failed_epoch == failed_epoch:
                return True


async def test_copies_that_no_worker_of_this_cluster_sends_are_refused(model: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    secret.chmod(0o600)
    settings = SETTINGS | {"cluster_secret_file": str(secret)}
    async with running_cluster(model, decode=settings, prefill=settings, have_roles=True) as cluster:
        numerics = cluster.decode.numerics_class
        stub = decode_pb2_grpc.DecodeServiceStub(cluster.decode_channel)

        async def replicate(is_sealed: bool = True, **fields: Any) -> None:
            plain = {"request_id": "copies", "block_hashes": [bytes(16)], "numerics_class": numerics} | fields
            request = decode_pb2.ReplicateRequest(**plain)
            if is_sealed:
                request = cluster.seals.seal(Purpose.REPLICA, cluster.decode.seal_name, request)
            with mapped_rpc_errors("the decode worker"):
                await stub.Replicate(request, timeout=DEADLINE_S)

        with pytest.raises(PeerRefused):
            await replicate(is_sealed=False)
        with pytest.raises(StaleError):
            await replicate(numerics_class="another")
        for wrong in ({"request_id": ""}, {"block_hashes": []}, {"block_hashes": [bytes(15)]}):
            with pytest.raises(RequestError):
                await replicate(**wrong)
        with pytest.raises(RequestError):
            await replicate(block_hashes=[bytes(16)] * 2)
        await cluster.all_free()


async def test_copies_that_do_not_come_free_their_blocks_with_the_lease(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_svc.intake._LEASE_S", 0.05)
    dropped = asyncio.Event()
    loop, drop = asyncio.get_running_loop(), Replicas.drop

    def noted(replicas: Replicas, name: Any) -> None:
        drop(replicas, name)
        loop.call_soon_threadsafe(dropped.set)

    monkeypatch.setattr(Replicas, "drop", noted)
    async with (
        running_cluster(model, decode=SETTINGS, prefill=SETTINGS, have_roles=True) as cluster,
        open_channel(cluster.decode_address) as channel,
    ):
        request = decode_pb2.ReplicateRequest(
            request_id="copies", block_hashes=[bytes(16)], numerics_class=cluster.decode.numerics_class
        )
        answer = await decode_pb2_grpc.DecodeServiceStub(channel).Replicate(request)
        assert answer.ticket.num_blocks == 1
        async with asyncio.timeout(DEADLINE_S):
            await dropped.wait()
        await cluster.all_free()
