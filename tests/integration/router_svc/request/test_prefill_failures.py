"""Faults of prefill workers, as a client sees them over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.base.errors import Draining, NoFreeBlocks, RequestError, StaleEpoch
from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.workers import Tier
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import (
    TEXT,
    TOKENS,
    both,
    once_known,
    states,
)
from tests.integration.router_svc.script import Context, failing, silent_for, vanish


@pytest.mark.parametrize("point", ["prefill", "prefill_token"])
async def test_a_prefill_worker_lost_before_its_first_token_is_replaced(cluster: ScriptedCluster, point: str) -> None:
    cluster.script.fail(point, vanish)
    text, _ = await cluster.stream()
    assert text == TEXT
    first, second = cluster.calls.prefills
    assert (first.ref.attempt, second.ref.attempt) == (1, 2)
    assert list(second.forced_first_tokens) == []
    record = await cluster.only_trace()
    assert states(record) == [("decode", 1), ("prefill", 1), ("prefill", 2)]
    assert record["decisions"][1]["worker"] != record["decisions"][2]["worker"]
    assert [retry["reason"] for retry in record["retries"]] == ["peer_lost"]
    assert await cluster.metric("request_retries_total", reason="peer_lost") == 1


async def test_a_prefill_worker_lost_after_its_first_token_is_replaced_and_no_token_is_repeated(
    cluster: ScriptedCluster,
) -> None:
    cluster.script.fail("prefill_commit", vanish)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert list(cluster.calls.prefills[1].forced_first_tokens) == TOKENS[:1]


async def test_without_another_prefill_worker_the_decode_worker_prefills(small_cluster: ScriptedCluster) -> None:
    small_cluster.script.fail("prefill_commit", vanish)
    text, _ = await small_cluster.stream()
    assert text == TEXT
    assert small_cluster.calls.commands[-1] == "prefill_locally"
    record = await small_cluster.only_trace()
    assert [fallback["reason"] for fallback in record["fallbacks"]] == ["peer_lost"]
    assert record["prefilled_by"] == "decode"
    assert await small_cluster.metric("prefill_fallbacks_total", reason="peer_lost") == 1


async def test_after_two_failed_prefill_workers_the_decode_worker_prefills(cluster: ScriptedCluster) -> None:
    cluster.script.fail("prefill_token", vanish, vanish)
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert [retry["reason"] for retry in record["retries"]] == ["peer_lost", "peer_lost"]
    assert [fallback["reason"] for fallback in record["fallbacks"]] == ["peer_lost"]


@pytest.mark.advanced_time
async def test_a_prefill_worker_that_is_silent_for_a_lease_is_replaced(cluster: ScriptedCluster) -> None:
    async def silent_once_heard(context: Context) -> None:
        # Each report begins the time anew.
        await cluster.calls.until(lambda: cluster.calls.commands.count("keep_lease") == 3)
        await silent_for(cluster.script.lease_s)(context)

    cluster.script.fail("prefill_token", silent_once_heard)
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert [retry["reason"] for retry in record["retries"]] == ["transfer_timeout"]
    assert record["fallbacks"] == []
    # It still sends heartbeats, so only this request avoids it.
    assert len(cluster.router.cluster.ready("prefill")) == 2


async def test_a_lost_prefill_worker_is_excluded_for_other_requests(cluster: ScriptedCluster) -> None:
    cluster.workers["prefill-0"].registrar._heartbeat_s = 1e9
    cluster.script.fail("prefill", vanish)
    await cluster.complete()
    lost = cluster.calls.prefills[0]
    assert lost.ref.attempt == 1
    assert len(cluster.router.cluster.ready("prefill")) == 1


async def test_a_worker_that_answers_a_call_is_used_again(small_cluster: ScriptedCluster) -> None:
    directory, workers = small_cluster.router.cluster.directory, small_cluster.workers
    for worker in workers.values():
        worker.registrar._heartbeat_s = 1e9

    async def lose_both(_: Context) -> None:
        for worker in workers.values():
            directory.mark_lost(worker.record.worker_id, worker.record.epoch)

    small_cluster.script.fail("prefill", lose_both)
    text, _ = await small_cluster.stream()
    assert text == TEXT
    assert len(small_cluster.router.cluster.ready("prefill")) == 1
    assert len(small_cluster.router.cluster.ready("decode")) == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Draining("shutting down"), "draining"),
        (NoFreeBlocks("full"), "no_free_blocks"),
        (StaleEpoch("the decode worker restarted"), "stale_epoch"),
    ],
)
async def test_a_prefill_worker_that_refuses_is_replaced(
    cluster: ScriptedCluster, error: Exception, reason: str
) -> None:
    cluster.script.fail("prefill", failing(error))
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert [retry["reason"] for retry in record["retries"]] == [reason]


async def test_a_request_that_a_worker_rejects_as_wrong_is_not_retried(cluster: ScriptedCluster) -> None:
    cluster.script.fail("prefill", failing(RequestError("the prompt is odd", param="prompt")))
    status, body = await cluster.complete()
    assert status == 400
    assert body["error"]["param"] == "prompt"
    assert len(cluster.calls.prefills) == 1


async def test_a_prefill_worker_lost_after_its_commit_does_not_matter(cluster: ScriptedCluster) -> None:
    async def vanish_once_decoding(context: object) -> None:
        await cluster.calls.until(lambda: bool(cluster.calls.commands))
        await vanish(context)

    cluster.script.fail("prefill_committed", vanish_once_decoding)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert len(cluster.calls.decode_starts) == 1


async def test_a_decode_worker_may_finish_before_the_prefill_workers_first_token_arrives(
    cluster: ScriptedCluster,
) -> None:
    async def commit_first(_: object) -> None:
        [committed] = cluster.calls.commits.values()
        committed.set()
        await cluster.calls.until(lambda: cluster.calls.num_decoded == 1)

    cluster.script.fail("prefill_token", commit_first)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert (await cluster.only_trace())["retries"] == []


async def test_a_prefill_worker_lost_while_decoding_waits_for_its_first_token_does_not_exclude_the_decode_worker(
    small_cluster: ScriptedCluster,
) -> None:
    cluster = small_cluster
    cluster.workers["decode-0"].registrar._heartbeat_s = 1e9

    async def commit_first(_: object) -> None:
        [committed] = cluster.calls.commits.values()
        committed.set()

    is_decoding = once_known(cluster, lambda record: record["state"] == "decoding", vanish)
    cluster.script.fail("prefill_token", both(commit_first, is_decoding))
    text, _ = await cluster.stream()
    assert text == TEXT
    assert [start.ref.attempt for start in cluster.calls.decode_starts] == [1, 2]
    assert [worker.worker_id for worker in cluster.router.cluster.ready("decode")] == ["decode-0"]
    record = await cluster.only_trace()
    assert (record["retries"][0]["reason"], record["retries"][0]["worker"]) == ("peer_lost", "prefill-0")


async def test_first_tokens_lost_with_their_prefill_worker_do_not_exclude_the_decode_worker(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    tiers: dict[str, Tier] = {"prefill-0": "prefill", "prefill-1": "prefill", "decode-0": "decode"}
    async with open_cluster(redis_server, model_dir, tiers) as cluster:

        async def commit_first(_: object) -> None:
            [committed] = cluster.calls.commits.values()
            committed.set()

        async def renewal_requested(_: object) -> None:
            await cluster.calls.until(lambda: "renew_ticket" in cluster.calls.commands)

        cluster.script.fail("prefill_token", both(commit_first, vanish))
        cluster.script.fail("decode_started", renewal_requested)
        text, _ = await cluster.stream()
        assert text == TEXT
        assert [start.ref.attempt for start in cluster.calls.decode_starts] == [1, 3]
        record = await cluster.only_trace()
        assert len({retry["worker"] for retry in record["retries"]}) == 1
        assert "first tokens" in record["retries"][1]["error"]


async def test_prefill_progress_keeps_the_decode_workers_lease(cluster: ScriptedCluster) -> None:
    async def kept_three_times(_: Context) -> None:
        await cluster.calls.until(lambda: cluster.calls.commands.count("keep_lease") == 3)

    cluster.script.fail("prefill_token", kept_three_times)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert (await cluster.only_trace())["retries"] == []
