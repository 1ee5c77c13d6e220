"""Blocks of a running request are copied to another decode worker, which goes on without computing them again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from decode_svc.replication.replicas import Replicas
from decode_svc.replication.source import ReplicationPolicy, ReplicationSource
from decode_svc.replication.target import ReplicationTarget
from kvtransfer.handover.receiver import Receiver
from pdserve.base.errors import PeerRefused, RequestError, StaleError
from pdserve.base.wire import sampling_to_wire
from pdserve.net.rpc import mapped_rpc_errors, open_channel
from pdserve.peers.seals import Purpose
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
from tests.integration.services.test_handover import counted
from tests.integration.services.test_roles import change
from tests.support.redis import eventually
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
        await _all_free(cluster)


async def _all_free(cluster: LocalCluster) -> None:
    """Once no copies are on their way, every block is free."""

    async def are_over() -> bool:
        held = [
            await worker.run(lambda worker=worker: list(cast(Any, worker._scheduler)._decode.replicas.held))
            for worker in (cluster.prefill, cluster.decode)
        ]
        return not any(blocks for batches in held for blocks in batches)

    await eventually(are_over)
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
    monkeypatch.setattr("decode_svc.replication.source._AGAIN_S", 0.0)
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
        await _all_free(cluster)


async def test_a_fault_while_blocks_are_copied_costs_the_copies_alone(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when copying, which is best effort, ends the worker: two faults, in a copy and in its round."""
    arrivals = noted_arrivals(monkeypatch)
    monkeypatch.setattr("decode_svc.replication.source._AGAIN_S", 0.0)
    faults = ["copy", "round"]
    send, by_target = ReplicationSource._send, ReplicationPolicy.by_target

    async def sending(replication: Any, *arguments: Any) -> bool:
        if faults and faults[0] == "copy":
            faults.pop(0)
            raise ValueError("a fault of our own")
        return await send(replication, *arguments)

    def targets(policy: Any) -> Any:
        if faults and faults[0] == "round":
            faults.pop(0)
            raise KeyError("another fault of our own")
        return by_target(policy)

    monkeypatch.setattr(ReplicationSource, "_send", sending)
    monkeypatch.setattr(ReplicationPolicy, "by_target", targets)
    async with running_cluster(model, decode=SETTINGS, prefill=SETTINGS, have_roles=True) as cluster:
        expected = await cluster.local(PROMPT, max_tokens=TOKENS)
        hold_steps(monkeypatch, after=SEEN, until="check_integrity")
        request = cluster.request(PROMPT, max_tokens=TOKENS)
        await request.start(local_prefill_threshold=ALWAYS_LOCAL)
        await request.send(replicate_to=named(cluster.prefill, cluster.prefill_address))
        assert await _wanted(request, cluster.prefill.epoch)
        await request.send(replicate_to=named(cluster.prefill, cluster.prefill_address))
        async with asyncio.timeout(DEADLINE_S):
            assert await arrivals.get() > 0
        assert faults == []
        request.cancel()
        await _resume_steps(cluster)
        assert await cluster.local(PROMPT, max_tokens=TOKENS) == expected
        await _all_free(cluster)


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
        await _all_free(cluster)


async def test_copies_that_do_not_come_free_their_blocks_with_the_lease(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decode_svc.replication.target._LEASE_S", 0.05)
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
        assert counted(cluster.decode, "leases_expired", arrived="nothing") == 1
        await _all_free(cluster)


@contextmanager
def steps_held(worker: Worker) -> Iterator[None]:
    """The step thread runs no call until the block ends."""
    may_go_on = threading.Event()
    worker.post(may_go_on.wait)
    try:
        yield
    finally:
        may_go_on.set()


async def _cancelled_while_steps_are_held(worker: Worker, work: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.create_task(work)
    with steps_held(worker):
        await asyncio.sleep(0)  # The task waits for the step thread from here on.
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_blocks_for_copies_are_free_again_when_their_sender_leaves_before_it_has_a_ticket(model: Path) -> None:
    async with running_cluster(model, decode=SETTINGS, prefill=SETTINGS, have_roles=True) as cluster:
        worker, scheduler = cluster.decode, cast(Any, cluster.decode._scheduler)
        request = decode_pb2.ReplicateRequest(
            request_id="copies", block_hashes=[bytes(16)], numerics_class=worker.numerics_class
        )
        intake = ReplicationTarget(worker, scheduler._decode.replicas, _no_receiver)
        await _cancelled_while_steps_are_held(worker, intake.reserve(request))
        await _all_free(cluster)


def _no_receiver() -> Receiver:
    raise AssertionError("the caller has left")


async def test_what_was_taken_while_its_holder_was_cancelled_is_let_go_and_nothing_else(model: Path) -> None:
    let_go: list[str] = []

    async def hold(take: Callable[[], str]) -> None:
        async with cluster.decode.holding(take, let_go.append):
            raise AssertionError("it was cancelled before")

    def fails() -> str:
        raise StaleError("it is held by another one")

    async with running_cluster(model) as cluster:
        await _cancelled_while_steps_are_held(cluster.decode, hold(lambda: "blocks"))
        assert let_go == ["blocks"]
        await _cancelled_while_steps_are_held(cluster.decode, hold(fails))
        assert let_go == ["blocks"]
