"""The handover between real services is exact, and no failure becomes a wrong token or a leak."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtransfer.handover.memory import Bundle
from kvtransfer.handover.send_machine import ABORTED_S
from kvtransfer.handover.staging import StagedMemory
from kvtransfer.transport import Buffer, Operation, Peer
from kvtransfer.transport.inproc import InprocTransport
from pdserve.base.errors import (
    DigestMismatch,
    LayoutMismatch,
    NoFreeBlocks,
    PeerLost,
    RequestError,
    StaleAttempt,
    StaleError,
    TransferTimeout,
)
from pdserve.base.ids import BlockId, RequestId
from pdserve.engine.kv_cache import KvCache
from pdserve.v1 import decode_pb2
from pdserve.worker.kv_bytes import host_blocks as worker_blocks
from pdserve.worker.serve.worker import Worker
from prefill_svc.scheduler import PrefillScheduler
from tests.integration.services.local_cluster import (
    ALWAYS_LOCAL,
    DEADLINE_S,
    LEASE_S,
    KeptLeases,
    RouterRequest,
    hold_steps,
    running_cluster,
)
from tests.support.devices import needs_triton
from tests.support.virtual_time import advance
from tests.unit.model.tiny import save_model

PROMPT = [(7 * position) % 90 + 3 for position in range(45)]


class Corrupting(InprocTransport):
    """Flips one bit of every block it sends while `armed`."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = True

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        if self.armed:
            buffer = np.array(buffer)
            buffer[-1] ^= 1
        return super().post_send(peer, tag, buffer)


class Hanging(InprocTransport):
    """Sends nothing, like a worker that hangs; every send stays in flight until the peer is disconnected."""

    def __init__(self) -> None:
        super().__init__()
        self.has_sent = asyncio.Event()

    def post_send(self, peer: Peer, tag: int, buffer: Buffer) -> Operation:
        self.has_sent.set()
        return super().post_send(peer, (tag + (1 << 40)) % (1 << 64), buffer)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("tiny"))


async def _handed_over(request: RouterRequest) -> dict[int, list[int]]:
    await request.start()
    await request.prefill(await request.ticket())
    return await request.finish()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.9, "n": 3, "top_p": 0.9}, {"temperature": 1.0, "repetition_penalty": 1.3}]
)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 45])
async def test_handed_over_tokens_are_those_of_local_prefill(
    model: Path, length: int, params: dict[str, float]
) -> None:
    async with running_cluster(model) as cluster:
        prompt = PROMPT[:length]
        assert await _handed_over(cluster.request(prompt, **params)) == await cluster.local(prompt, **params)
        await cluster.all_free()


@pytest.fixture(params=["host", pytest.param("device", marks=needs_triton)])
def staged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[StagedMemory]:
    """The stages, of twelve slots, through which both workers send and receive blocks; the decode worker's first.

    In memory of the host, or of the device, which here is the host's and packs in Triton's interpreter.
    """
    stages: list[StagedMemory] = []

    def block_memory(kv_cache: KvCache, staging_bytes: int, *, is_on_device: bool, is_shared: bool) -> StagedMemory:
        memory = torch.zeros(12 * kv_cache.layout.block_bytes, dtype=torch.uint8)
        if request.param == "host":
            stages.append(worker_blocks.staged(kv_cache, memory, bundle_blocks=4))
        else:
            from pdserve.worker.kv_bytes.device_blocks import staged_on_device

            stages.append(staged_on_device(kv_cache, memory, bundle_blocks=4))
        return stages[-1]

    monkeypatch.setattr("pdserve.worker.serve.worker.block_memory", block_memory)
    return stages


async def test_blocks_that_pass_through_a_stage_give_the_tokens_of_local_prefill(
    model: Path, staged: list[StagedMemory]
) -> None:
    # Triton's interpreter packs: on a busy machine it takes seconds, in which no lease may end.
    async with running_cluster(model, decode={"lease_s": 120.0}) as cluster:
        prompts = [[(7 * first + 3 * position) % 97 for position in range(36)] for first in range(4)]  # 9 blocks each
        requests = [cluster.request(prompt) for prompt in prompts]
        for request in requests:
            await request.start()

        async def hand_over(request: RouterRequest) -> dict[int, list[int]]:
            # The stage has space for a part of one: messages wait for it.
            await request.prefill(await request.ticket())
            return await request.finish()

        handed_over = await asyncio.gather(*map(hand_over, requests))
        assert all(stage.num_free == stage.max_blocks == 12 for stage in staged)
        assert handed_over == [await cluster.local(prompt) for prompt in prompts]
        await cluster.all_free()


@pytest.mark.advanced_time
async def test_a_sender_that_waits_for_its_own_stage_keeps_its_lease(
    model: Path, staged: list[StagedMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptLeases(monkeypatch)
    async with running_cluster(model, decode={"lease_s": LEASE_S}) as cluster:
        stage = staged[1]
        held = await stage.lend([[BlockId(0)]] * (stage.max_blocks // stage.bundle_blocks))
        request = cluster.request(PROMPT[:32])
        await request.start()
        prefill = asyncio.create_task(request.prefill(await request.ticket(), keeps_lease=True))
        await kept.outlive(LEASE_S)
        assert not prefill.done()
        for buffer in held:
            stage.give_back(buffer)
        await prefill
        assert await request.finish() == await cluster.local(PROMPT[:32])
        await cluster.all_free()


async def test_a_prompt_larger_than_both_stages_is_handed_over(model: Path, staged: list[StagedMemory]) -> None:
    prompt = PROMPT + PROMPT[:4]  # 13 blocks, and the stages have 12.
    async with running_cluster(model, decode={"lease_s": 120.0}) as cluster:
        request = cluster.request(prompt)
        await request.start()
        done = await request.prefill(await request.ticket())
        assert done.sent_blocks == 13
        assert await request.finish() == await cluster.local(prompt)
        assert [stage.num_free for stage in staged] == [12, 12]
        await cluster.all_free()


async def test_blocks_of_an_fp8_cache_are_handed_over_and_decoded_from(model: Path) -> None:
    # Sums of plain torch depend on the chunk size, which is therefore the same on both workers.
    fp8 = {"kv_cache_dtype": "fp8_e4m3", "kernels": "reference", "max_num_batched_tokens": 8}
    async with running_cluster(model, prefill=fp8, decode=fp8) as cluster:
        assert cluster.decode.model.layout.dtype == "fp8_e4m3"
        request = cluster.request(PROMPT, n=2, temperature=0.9)
        await request.start()
        ticket = await request.ticket()
        assert ticket.layout.dtype == "fp8_e4m3"
        done = await request.prefill(ticket)
        assert done.sent_blocks == 12
        handed_over = await request.finish()
        await cluster.all_free()
    async with running_cluster(model, prefill=fp8, decode=fp8) as cluster:
        assert handed_over == await cluster.local(PROMPT, n=2, temperature=0.9)


async def test_only_missing_blocks_are_granted_and_sent(model: Path) -> None:
    async with running_cluster(model) as cluster:
        await _handed_over(cluster.request(PROMPT[:20]))
        request = cluster.request(PROMPT)
        await request.start()
        ticket = await request.ticket()
        assert (ticket.first_block, ticket.num_blocks) == (5, 12 - 5)
        done = await request.prefill(ticket)
        assert done.sent_blocks == 7
        assert done.cached_tokens == 20
        assert await request.finish() == await cluster.local(PROMPT)
        await cluster.all_free()


async def test_a_router_that_leaves_while_messages_wait_for_the_stage_frees_their_blocks(
    model: Path, staged: list[StagedMemory]
) -> None:
    waits = asyncio.Event()
    async with running_cluster(model, decode={"lease_s": 120.0}) as cluster:
        lend = staged[0].lend
        held = await lend([[BlockId(0)]] * 3)

        async def noted(bundles: Sequence[Bundle]) -> list[Buffer]:
            waits.set()
            return await lend(bundles)

        staged[0].lend = noted  # type: ignore[method-assign]
        request = cluster.request(PROMPT)
        await request.start()
        prefill = asyncio.create_task(request.prefill(await request.ticket()))
        await waits.wait()
        request.cancel()
        with pytest.raises(StaleError):
            await prefill
        await cluster.all_free()
        for buffer in held:
            staged[0].give_back(buffer)
        assert await _handed_over(cluster.request(PROMPT)) == await cluster.local(PROMPT)
        await cluster.all_free()


async def test_wrong_bytes_are_refused_and_a_renewed_ticket_gives_the_right_tokens(model: Path) -> None:
    wire = Corrupting()
    async with running_cluster(model, prefill_transport=wire) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        ticket = await request.ticket()
        with pytest.raises(DigestMismatch, match="blocks are not what was sent"):
            await request.prefill(ticket)
        first = tuple(tokens[0] for tokens in request.tokens.values())
        wire.armed = False
        await request.send(renew_ticket=decode_pb2.RenewTicket(attempt=2))
        renewed = await request.ticket()
        assert renewed.attempt == 2
        assert renewed.transfer_id != ticket.transfer_id
        await request.prefill(renewed, forced=first)
        assert await request.finish() == await cluster.local(PROMPT)
        await cluster.all_free()


async def test_after_wrong_bytes_the_decode_worker_can_compute_the_prompt(model: Path) -> None:
    async with running_cluster(model, prefill_transport=Corrupting()) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        with pytest.raises(DigestMismatch):
            await request.prefill(await request.ticket())
        forced = [tokens[0] for tokens in request.tokens.values()]
        await request.send(prefill_locally=decode_pb2.PrefillLocally(attempt=2, forced_first_tokens=forced))
        assert await request.finish() == await cluster.local(PROMPT)
        await cluster.all_free()


def counted(worker: Worker, name: str, **labels: str) -> float | None:
    """The value of one series of a worker's counter."""
    known = {"model_name": "tiny", "tier": worker.tier}
    return worker.metrics.registry.get_sample_value(f"pdserve_{name}_total", known | labels)


async def test_a_commit_of_an_older_attempt_is_refused(model: Path) -> None:
    async with running_cluster(model) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        old = await request.ticket()
        await request.send(renew_ticket=decode_pb2.RenewTicket(attempt=2))
        new = await request.ticket()
        with pytest.raises(StaleError):
            await request.prefill(old)
        assert counted(cluster.decode, "stale_messages", message="commit", reason="stale_error") == 1
        await request.prefill(new)
        assert await request.finish() == await cluster.local(PROMPT)
        await cluster.all_free()


@pytest.mark.advanced_time
async def test_a_lease_without_progress_ends_the_reservation_and_frees_its_blocks(model: Path) -> None:
    async with running_cluster(model, decode={"lease_s": LEASE_S}) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        await request.ticket()
        advance(LEASE_S)
        with pytest.raises(TransferTimeout, match="0 of 12 blocks had arrived"):
            await request.event()
        assert counted(cluster.decode, "leases_expired", arrived="nothing") == 1
        await cluster.all_free()


@pytest.mark.advanced_time
async def test_a_lease_that_is_kept_does_not_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptLeases(monkeypatch)
    async with running_cluster(model, decode={"lease_s": LEASE_S}) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        ticket = await request.ticket()
        for _ in range(5):
            now = advance(LEASE_S / 2)
            await request.send(keep_lease=decode_pb2.KeepLease())
            await kept.since(now)
        await request.prefill(ticket)
        assert await request.finish() == await cluster.local(PROMPT)


@pytest.mark.advanced_time
async def test_a_sender_whose_blocks_never_arrive_gives_up_when_the_lease_ends(model: Path) -> None:
    wire = Hanging()
    async with running_cluster(model, prefill_transport=wire, decode={"lease_s": LEASE_S}) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        prefill = asyncio.create_task(request.prefill(await request.ticket()))
        async with asyncio.timeout(DEADLINE_S):
            await wire.has_sent.wait()
        advance(LEASE_S)
        with pytest.raises((TransferTimeout, PeerLost, StaleError)):
            await prefill
        with pytest.raises(TransferTimeout):
            await request.event()
        await cluster.all_free()


@pytest.mark.advanced_time
async def test_a_prompt_whose_caller_leaves_is_computed_no_further_while_its_transfer_is_stuck(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker that is stopped takes nothing: the transfer ends long before its lease, the computing at once."""
    hold_steps(monkeypatch, after=3, until="stop", scheduler=PrefillScheduler)
    wire, stopped = Hanging(), asyncio.Event()
    loop, stop = asyncio.get_running_loop(), PrefillScheduler.stop

    def noted(scheduler: PrefillScheduler, request_id: RequestId) -> bool:
        loop.call_soon_threadsafe(stopped.set)
        return stop(scheduler, request_id)

    monkeypatch.setattr(PrefillScheduler, "stop", noted)
    chunks = {"max_num_batched_tokens": 4}
    async with running_cluster(model, prefill_transport=wire, prefill=chunks, decode={"lease_s": LEASE_S}) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        prefill = asyncio.create_task(request.prefill(await request.ticket()))
        async with asyncio.timeout(DEADLINE_S):
            await wire.has_sent.wait()
            prefill.cancel()
            await stopped.wait()
        scheduler = cluster.prefill._scheduler
        assert isinstance(scheduler, PrefillScheduler)
        load = await cluster.prefill.run(scheduler.load)
        assert (load.num_running, load.num_held, scheduler.has_work()) == (0, 1, False)
        assert load.free_blocks < load.total_blocks, "a stuck transfer may still read them"
        assert scheduler.num_computed(RequestId(request.request_id)) < len(PROMPT)
        advance(ABORTED_S)
        request.cancel()
        await cluster.all_free()


async def test_a_caller_that_leaves_frees_both_workers_in_every_stage_of_a_request(model: Path) -> None:
    async with running_cluster(model) as cluster:
        for progress in range(4):
            request = cluster.request(PROMPT, max_tokens=150)
            await request.start()
            if progress > 0:
                ticket = await request.ticket()
                prefill = asyncio.create_task(request.prefill(ticket))
                if progress > 1:
                    await prefill
                    for _ in range(2):
                        await request.event()
                elif progress == 1:
                    prefill.cancel()
            request.cancel()
            await cluster.all_free()


async def test_workers_with_different_layouts_refuse_each_other_and_name_the_field(model: Path) -> None:
    async with running_cluster(model, prefill={"block_size": 8}) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        with pytest.raises(LayoutMismatch, match="block_size is 8 here and 4 there"):
            await request.prefill(await request.ticket())
        request.cancel()
        await cluster.all_free()


async def test_an_fp8_cache_is_no_match_for_one_of_another_dtype(model: Path) -> None:
    async with running_cluster(model, prefill={"kv_cache_dtype": "fp8_e4m3"}) as cluster:
        request = cluster.request(PROMPT)
        await request.start()
        with pytest.raises(LayoutMismatch, match="dtype is 'fp8_e4m3' here and 'float32' there"):
            await request.prefill(await request.ticket())
        request.cancel()
        await cluster.all_free()


async def test_a_prompt_that_ends_with_its_first_token_leaves_the_ticket_unused(model: Path) -> None:
    async with running_cluster(model) as cluster:
        request = cluster.request(PROMPT, max_tokens=1)
        await request.start()
        done = await request.prefill(await request.ticket())
        assert done.commit_s == 0
        request.cancel()
        await cluster.all_free()


async def test_a_stopped_choice_sends_no_more_tokens_and_the_others_continue(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_cluster(model) as cluster:
        whole = await cluster.local(PROMPT, n=2, temperature=0.9, max_tokens=60)
        request = cluster.request(PROMPT, n=2, temperature=0.9, max_tokens=60)
        hold_steps(monkeypatch, after=3, until="stop_choice")
        await request.start(local_prefill_threshold=ALWAYS_LOCAL)
        while not request.tokens[0]:
            for choice in (await request.event()).tokens.choices:
                request.take(choice)
        await request.stop_choice(0)
        tokens = await request.finish()
        assert tokens[1] == whole[1]
        assert tokens[0] == whole[0][: len(tokens[0])]
        assert len(tokens[0]) < 60
        await cluster.all_free()


async def test_a_newer_attempt_of_a_request_takes_over_from_an_older_one(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_cluster(model) as cluster:
        hold_steps(monkeypatch, after=3, until="abort")
        older = cluster.request(PROMPT, "same", max_tokens=150)
        await older.start(local_prefill_threshold=ALWAYS_LOCAL)
        await older.event()
        newer = cluster.request(PROMPT, "same")
        await newer.start(local_prefill_threshold=ALWAYS_LOCAL, attempt=2)
        with pytest.raises(StaleAttempt):
            await older.finish()
        assert await newer.finish() == await cluster.local(PROMPT)
        stale = cluster.request(PROMPT, "other")
        await stale.start(local_prefill_threshold=ALWAYS_LOCAL, attempt=2)
        await stale.event()
        same = cluster.request(PROMPT, "other")
        await same.start(local_prefill_threshold=ALWAYS_LOCAL, attempt=2)
        with pytest.raises(StaleAttempt):
            await same.event()
        await stale.finish()
        assert counted(cluster.decode, "stale_messages", message="start", reason="stale_attempt") == 1
        await cluster.all_free()


async def test_requests_that_no_worker_could_serve_are_refused_with_the_reason(model: Path) -> None:
    async with running_cluster(model) as cluster:
        too_long = cluster.request([5] * 600)
        await too_long.start()
        with pytest.raises((RequestError, NoFreeBlocks), match="600"):
            await too_long.event()
        unknown = cluster.request([5, 10_000])
        await unknown.start()
        with pytest.raises(RequestError, match="token ids"):
            await unknown.event()
        late = cluster.request(PROMPT)
        await late.send(keep_lease=decode_pb2.KeepLease())
        with pytest.raises(RequestError, match="first message"):
            await late.event()
        await cluster.all_free()


async def test_many_requests_under_preemption_give_the_tokens_that_each_gives_alone(model: Path) -> None:
    prompts = [[(position * (seed + 2)) % 90 + 3 for position in range(20 + seed)] for seed in range(12)]
    async with running_cluster(model) as roomy:
        alone = [await roomy.local(prompt, temperature=0.8, seed=9, max_tokens=40) for prompt in prompts]
    # 24 blocks hold about two of the twelve requests.
    async with running_cluster(model, decode={"kv_cache_memory": 24 * 1024}) as tight:
        requests = [tight.request(prompt, temperature=0.8, seed=9, max_tokens=40) for prompt in prompts]
        together = await asyncio.gather(*(_handed_over(request) for request in requests))
        await tight.all_free()
        assert tight.decode.load.num_preemptions > 0
    assert together == alone
