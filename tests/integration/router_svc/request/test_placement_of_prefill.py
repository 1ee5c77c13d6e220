"""Where prompts are prefilled, and how the record and the metrics show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.workers import WorkerLoad
from router_svc.routing.local_prefill import ALWAYS_LOCAL
from tests.integration.router_svc.conftest import TWO_OF_EACH, ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import (
    ONE_OF_EACH,
    TEXT,
)
from tests.integration.router_svc.script import hang, vanish
from tests.support.redis import eventually
from tests.support.tiny_model import END


async def test_one_token_needs_no_decode_worker(cluster: ScriptedCluster) -> None:
    status, body = await cluster.complete(max_tokens=1, n=2)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == ["H", "H"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert cluster.calls.decode_starts == []
    assert not cluster.calls.prefills[0].HasField("ticket")


async def test_one_token_comes_from_a_decode_worker_if_no_prefill_worker_can_compute_it(
    cluster: ScriptedCluster,
) -> None:
    cluster.script.fail("prefill", *[vanish] * 4)
    status, body = await cluster.complete(max_tokens=1)
    assert status == 200
    assert body["choices"][0]["text"] == "H"


async def test_a_request_that_ends_with_its_first_token_returns_the_ticket_unused(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [[END]]
    cluster.script.fail("prefill_commit", hang)
    status, body = await cluster.complete()
    assert (status, body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (200, "", "stop")
    await cluster.calls.until(lambda: cluster.calls.num_open == 0)
    assert not any(committed.is_set() for committed in cluster.calls.commits.values())


async def test_a_short_prompt_is_prefilled_by_the_decode_worker(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH, local_prefill_threshold=64) as cluster:
        text, _ = await cluster.stream()
        assert text == TEXT
        assert cluster.calls.prefills == []
        record = await cluster.only_trace()
        assert (record["prefilled_by"], record["local_prefill_reason"]) == ("decode", "short")
        # The step that computed the prompt was not a wait for blocks.
        seconds = record["seconds_in"]
        assert (seconds["reserve"], seconds["wire"]) == (0.0, 0.0)
        assert min(seconds["prefill"], seconds["decode"]) > 0.0
        assert record["fallbacks"] == []
        assert await cluster.metric("prefills_total", tier="decode") == 1


async def test_a_prompt_that_the_decode_worker_cannot_receive_counts_as_a_fallback(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH, local_prefill_threshold=1) as cluster:
        cluster.calls.max_receivable_tokens = 2
        text, _ = await cluster.stream()
        assert text == TEXT
        record = await cluster.only_trace()
        assert (record["prefilled_by"], record["local_prefill_reason"]) == ("decode", "fallback")
        assert [fallback["reason"] for fallback in record["fallbacks"]] == ["not_receivable"]
        assert await cluster.metric("prefill_fallbacks_total", reason="not_receivable") == 1


@pytest.mark.parametrize(("mode", "tier", "reason"), [("auto", "decode", "load"), ("threshold", "prefill", None)])
async def test_while_prompts_queue_at_the_prefill_tier_the_decode_worker_prefills(
    redis_server: PrivateRedis, model_dir: Path, mode: str, tier: str, reason: str | None
) -> None:
    settings: dict[str, object] = {"local_prefill_threshold": 4, "local_prefill": mode}
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, **settings) as cluster:
        cluster.workers["prefill-0"].set(load=WorkerLoad(queued_tokens=5000, prefill_tokens_per_s=1000.0))

        async def is_known() -> bool:
            return cluster.router.cluster.ready("prefill")[0].load.queued_tokens == 5000

        await eventually(is_known)
        text, _ = await cluster.stream()
        assert text == TEXT
        record = await cluster.only_trace()
        assert (record["prefilled_by"], record["local_prefill_reason"]) == (tier, reason)
        assert record["fallbacks"] == []
        assert ("prefills by itself" in record["decisions"][0]["why"]) is (tier == "decode")
        assert await cluster.metric("local_prefills_total", reason="load") == (tier == "decode")
        assert cluster.router.cluster.in_flight.prompt_tokens(cluster.workers[f"{tier}-0"].record.worker_id) == 0


@pytest.mark.parametrize(("expected", "fallbacks"), [(1, ["no_prefill_worker"]), (0, [])])
async def test_local_prefill_is_a_fallback_only_if_the_cluster_should_have_prefill_workers(
    redis_server: PrivateRedis, model_dir: Path, expected: int, fallbacks: list[str]
) -> None:
    async with open_cluster(redis_server, model_dir, {"decode-0": "decode"}, prefill_expected=expected) as cluster:
        text, _ = await cluster.stream()
        assert text == TEXT
        assert cluster.calls.decode_starts[0].local_prefill_threshold == ALWAYS_LOCAL
        record = await cluster.only_trace()
        assert [fallback["reason"] for fallback in record["fallbacks"]] == fallbacks
        assert record["local_prefill_reason"] == ("fallback" if fallbacks else "no_prefill_tier")
        assert bool(cluster.router.health.degraded) == bool(fallbacks)
