"""What a request survives, and what it does not: scripted faults of workers, seen by a client over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import AsyncMock

import pytest

from pdserve.base.errors import Draining, NoFreeBlocks, RequestError, StaleEpoch, TransferTimeout
from pdserve.base.ids import RouterId, WorkerId
from pdserve.base.workers import Tier, WorkerLoad
from pdserve.cli.private_redis import PrivateRedis
from router_svc.routing.cluster import Cluster
from router_svc.routing.local_prefill import ALWAYS_LOCAL
from router_svc.routing.placement import queued_tokens
from tests.integration.router_svc.conftest import TWO_OF_EACH, ScriptedCluster, open_cluster
from tests.integration.router_svc.fake_workers import Context, Fault, failing, hang, leave, vanish
from tests.support.redis import eventually
from tests.support.tiny_model import END, tokens_of

ONE_OF_EACH: dict[str, Tier] = {"prefill-0": "prefill", "decode-0": "decode"}
TEXT = "Hello world."
TOKENS = [*tokens_of(TEXT), END]


def states(record: dict[str, object]) -> list[object]:
    """Tier and attempt of each decision."""
    decisions = record["decisions"]
    assert isinstance(decisions, list)
    return [(decision["tier"], decision["attempt"]) for decision in decisions]


def once_known(cluster: ScriptedCluster, condition: Callable[[dict[str, Any]], bool], fault: Fault) -> Fault:
    """`fault`, once the request's record is so: streams of different workers have no order."""

    async def is_known() -> bool:
        return condition(await cluster.only_trace())

    async def wait(context: Context) -> None:
        await eventually(is_known)
        await fault(context)

    return wait


def after_first_token(cluster: ScriptedCluster, fault: Fault) -> Fault:
    """`fault`, once the router has prefill's first token."""
    return once_known(cluster, lambda record: "first_token" in record["phases"], fault)


async def go_on(_: Context) -> None:
    """No fault."""


async def test_an_undisturbed_request_has_every_phase_in_order(cluster: ScriptedCluster) -> None:
    # As it is where a step takes its time: prefill has said everything before decode's first token.
    cluster.script.fail("decode_token", once_known(cluster, lambda record: "sent_bytes" in record["reported"], go_on))
    await cluster.complete()
    record = await cluster.only_trace()
    phases = record["phases"]
    on_prefill = ["admitted", "reserved", "prefill_start", "first_token", "first_write", "finish"]
    on_decode = ["admitted", "reserved", "commit", "first_decode", "finish"]
    assert set(phases) == {*on_prefill, *on_decode}
    for order in (on_prefill, on_decode):
        times = [phases[name] for name in order]
        assert times == sorted(times)
    assert record["state"] == "finished"
    assert record["attempt"] == 1
    assert record["prefilled_by"] == "prefill"
    assert record["outcome"] == {
        "finish_reasons": ["stop"],
        "error": None,
        "completion_tokens": len(TOKENS),
        "cached_tokens": 0,
    }
    assert states(record) == [("decode", 1), ("prefill", 1)]
    assert record["retries"] == record["fallbacks"] == []
    assert record["reported"]["reserve_s"] == 0.125
    assert record["reported"]["prefill_compute_s"] == 1.5
    assert record["reported"]["exposed_s"] == 0.25
    assert record["reported"]["sent_bytes"] == 4096
    assert record["chunks"][0]["computed_tokens"] == 9


@pytest.mark.parametrize("point", ["prefill", "prefill_token"])
async def test_a_prefill_worker_lost_before_its_first_token_is_replaced(cluster: ScriptedCluster, point: str) -> None:
    cluster.script.fail(point, vanish)
    text, _ = await cluster.stream()
    assert text == TEXT
    first, second = cluster.world.prefills
    assert (first.ref.attempt, second.ref.attempt) == (1, 2)
    assert list(second.forced_first_tokens) == []
    record = await cluster.only_trace()
    assert states(record) == [("decode", 1), ("prefill", 1), ("prefill", 2)]
    assert record["decisions"][1]["worker"] != record["decisions"][2]["worker"]
    assert [retry["reason"] for retry in record["retries"]] == ["peer_lost"]
    assert await cluster.metric("request_retries_total", reason="peer_lost") == 1


async def test_a_prefill_worker_lost_after_its_first_token_is_replaced_without_a_token_twice(
    cluster: ScriptedCluster,
) -> None:
    cluster.script.fail("prefill_commit", vanish)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert list(cluster.world.prefills[1].forced_first_tokens) == TOKENS[:1]


async def test_without_another_prefill_worker_the_decode_worker_prefills(small_cluster: ScriptedCluster) -> None:
    small_cluster.script.fail("prefill_commit", vanish)
    text, _ = await small_cluster.stream()
    assert text == TEXT
    assert small_cluster.world.commands[-1] == "prefill_locally"
    record = await small_cluster.only_trace()
    assert [fallback["reason"] for fallback in record["fallbacks"]] == ["peer_lost"]
    assert record["prefilled_by"] == "decode"
    assert await small_cluster.metric("prefill_fallbacks_total", reason="peer_lost") == 1


async def test_two_prefill_workers_that_fail_end_in_one_fallback(cluster: ScriptedCluster) -> None:
    cluster.script.fail("prefill_token", vanish, vanish)
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert [retry["reason"] for retry in record["retries"]] == ["peer_lost", "peer_lost"]
    assert [fallback["reason"] for fallback in record["fallbacks"]] == ["peer_lost"]


async def test_a_prefill_worker_silent_for_a_lease_is_given_up(cluster: ScriptedCluster) -> None:
    cluster.script.fail("prefill_token", hang)
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert [retry["reason"] for retry in record["retries"]] == ["transfer_timeout"]
    # It keeps its heartbeats: only this request avoids it.
    assert len(cluster.router.cluster.ready("prefill")) == 2


async def test_a_lost_prefill_worker_is_excluded_for_other_requests_too(cluster: ScriptedCluster) -> None:
    cluster.workers["prefill-0"].registrar._heartbeat_s = 1e9
    cluster.script.fail("prefill", vanish)
    await cluster.complete()
    lost = cluster.world.prefills[0]
    assert lost.ref.attempt == 1
    assert len(cluster.router.cluster.ready("prefill")) == 1


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
    cluster.script.fail("prefill", failing(error))  # type: ignore[arg-type]
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert [retry["reason"] for retry in record["retries"]] == [reason]


async def test_a_request_that_a_worker_calls_wrong_is_not_tried_again(cluster: ScriptedCluster) -> None:
    cluster.script.fail("prefill", failing(RequestError("the prompt is odd", param="prompt")))
    status, body = await cluster.complete()
    assert status == 400
    assert body["error"]["param"] == "prompt"
    assert len(cluster.world.prefills) == 1


async def test_a_prefill_worker_lost_after_its_commit_is_not_missed(cluster: ScriptedCluster) -> None:
    async def vanish_once_decoding(context: object) -> None:
        await cluster.world.until(lambda: bool(cluster.world.commands))
        await vanish(context)  # type: ignore[arg-type]

    cluster.script.fail("prefill_committed", vanish_once_decoding)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert len(cluster.world.decode_starts) == 1


async def test_a_decode_worker_may_be_done_before_prefills_first_token_arrives(cluster: ScriptedCluster) -> None:
    async def commit_first(_: object) -> None:
        [committed] = cluster.world.commits.values()
        committed.set()
        await cluster.world.until(lambda: cluster.world.decodes_done == 1)

    cluster.script.fail("prefill_token", commit_first)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert (await cluster.only_trace())["retries"] == []


async def test_a_decode_worker_that_leaves_tokens_out_is_an_error(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode_token", None, after_first_token(cluster, leave))
    status, body = await cluster.complete()
    assert status == 502
    assert "closed the connection" in body["error"]["message"]


@pytest.mark.parametrize("point", ["decode", "decode_ticket"])
async def test_a_decode_worker_lost_before_anything_was_streamed_is_replaced(
    cluster: ScriptedCluster, point: str
) -> None:
    cluster.script.fail(point, vanish)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert [start.ref.attempt for start in cluster.world.decode_starts] == [1, 2]
    record = await cluster.only_trace()
    assert record["decisions"][0]["worker"] != record["decisions"][1]["worker"]


async def test_a_decode_worker_lost_after_prefills_first_token_is_replaced_by_one_that_goes_on(
    cluster: ScriptedCluster,
) -> None:
    cluster.script.fail("decode_started", after_first_token(cluster, vanish))
    text, _ = await cluster.stream()
    assert text == TEXT
    assert list(cluster.world.prefills[1].forced_first_tokens) == TOKENS[:1]


async def test_a_decode_worker_lost_in_mid_stream_is_told_in_the_stream(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode_token", None, None, after_first_token(cluster, vanish))
    text, events = await cluster.stream()
    assert text == TEXT[:3]
    assert events[-1]["error"]["type"] == "worker_lost_error"
    record = await cluster.only_trace()
    assert record["state"] == "failed"
    assert "Lost decode worker" in record["outcome"]["error"]


async def test_a_decode_worker_lost_in_mid_response_is_an_error_status(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode_token", None, after_first_token(cluster, vanish))
    status, body = await cluster.complete()
    assert status == 502
    assert body["error"]["type"] == "worker_lost_error"


async def test_a_reservation_that_expires_is_made_again_and_not_with_what_failed_before(
    small_cluster: ScriptedCluster,
) -> None:
    """Prefill and the lease of the decode worker, which is well, fail at the same time."""

    async def expire(context: Context) -> None:
        await small_cluster.world.until(lambda: bool(small_cluster.world.prefills))
        await failing(TransferTimeout("no progress for 5 s"))(context)

    small_cluster.script.fail("prefill", failing(TransferTimeout("nothing got through")))
    small_cluster.script.fail("decode_local", expire)
    text, _ = await small_cluster.stream()
    assert text == TEXT
    assert len(small_cluster.world.prefills) == 1
    record = await small_cluster.only_trace()
    assert [decision["worker"] for decision in record["decisions"]] == ["decode-0", "prefill-0", "decode-0"]
    assert record["prefilled_by"] == "decode"


async def test_a_request_does_not_go_through_all_decode_workers(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode", vanish, vanish)
    status, _ = await cluster.complete()
    assert status == 502
    assert len(cluster.world.decode_starts) == 2


async def test_without_another_decode_worker_a_loss_is_an_error_at_once(small_cluster: ScriptedCluster) -> None:
    small_cluster.script.fail("decode_ticket", vanish)
    status, body = await small_cluster.complete()
    assert status == 502
    assert "decode-0" in body["error"]["message"]


async def test_a_decode_worker_that_refuses_is_replaced(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode", failing(NoFreeBlocks("full")))
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert [retry["reason"] for retry in record["retries"]] == ["no_free_blocks"]


async def test_when_all_decode_workers_are_full_the_request_waits_for_room(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode", *[failing(NoFreeBlocks("full"))] * 4)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert len(cluster.world.decode_starts) == 5


async def test_room_that_never_comes_is_said_in_the_end(redis_server: PrivateRedis, model_dir: object) -> None:
    async with open_cluster(redis_server, model_dir, {"decode-0": "decode"}, reserve_timeout_s=0.5) as cluster:  # type: ignore[arg-type]
        cluster.script.fail("decode", *[failing(NoFreeBlocks("full"))] * 1000)
        async with cluster.http.post(
            f"{cluster.base_url}/v1/completions", json={"model": "tiny", "prompt": "x"}
        ) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"


async def test_a_decode_worker_that_never_grants_is_given_up(redis_server: PrivateRedis, model_dir: object) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH, reserve_timeout_s=0.3) as cluster:  # type: ignore[arg-type]
        cluster.script.fail("decode_ticket", hang)
        text, _ = await cluster.stream()
        assert text == TEXT
        assert len(cluster.world.decode_starts) == 2


async def test_a_decode_worker_that_falls_silent_is_given_up(redis_server: PrivateRedis, model_dir: object) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH, token_timeout_s=0.3) as cluster:  # type: ignore[arg-type]
        cluster.script.fail("decode_token", None, after_first_token(cluster, hang))
        _, events = await cluster.stream()
        assert "silent" in events[-1]["error"]["message"]


async def test_one_token_needs_no_decode_worker(cluster: ScriptedCluster) -> None:
    status, body = await cluster.complete(max_tokens=1, n=2)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == ["H", "H"]
    assert [choice["finish_reason"] for choice in body["choices"]] == ["length", "length"]
    assert cluster.world.decode_starts == []
    assert not cluster.world.prefills[0].HasField("ticket")


async def test_one_token_is_given_by_a_decode_worker_when_no_prefill_worker_can(cluster: ScriptedCluster) -> None:
    cluster.script.fail("prefill", *[vanish] * 4)
    status, body = await cluster.complete(max_tokens=1)
    assert status == 200
    assert body["choices"][0]["text"] == "H"


async def test_a_request_that_ends_with_its_first_token_returns_the_ticket_unsent(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [[END]]
    cluster.script.fail("prefill_commit", hang)
    status, body = await cluster.complete()
    assert (status, body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == (200, "", "stop")
    await cluster.world.until(lambda: cluster.world.open_calls == 0)
    assert not any(committed.is_set() for committed in cluster.world.commits.values())


async def test_a_short_prompt_is_prefilled_by_the_decode_worker(redis_server: PrivateRedis, model_dir: object) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH, local_prefill_threshold=64) as cluster:  # type: ignore[arg-type]
        text, _ = await cluster.stream()
        assert text == TEXT
        assert cluster.world.prefills == []
        record = await cluster.only_trace()
        assert (record["prefilled_by"], record["local_prefill_reason"]) == ("decode", "short")
        assert record["fallbacks"] == []
        assert await cluster.metric("prefills_total", tier="decode") == 1


async def test_a_prompt_that_the_decode_worker_cannot_receive_is_a_fallback_and_counted(
    redis_server: PrivateRedis, model_dir: object
) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH, local_prefill_threshold=1) as cluster:  # type: ignore[arg-type]
        cluster.world.most_receivable = 2
        text, _ = await cluster.stream()
        assert text == TEXT
        record = await cluster.only_trace()
        assert (record["prefilled_by"], record["local_prefill_reason"]) == ("decode", "fallback")
        assert [fallback["reason"] for fallback in record["fallbacks"]] == ["not_receivable"]
        assert await cluster.metric("prefill_fallbacks_total", reason="not_receivable") == 1


@pytest.mark.parametrize(("mode", "tier", "reason"), [("auto", "decode", "load"), ("threshold", "prefill", None)])
async def test_while_prompts_queue_at_the_prefill_tier_the_decode_worker_prefills_and_the_record_says_so(
    redis_server: PrivateRedis, model_dir: object, mode: str, tier: str, reason: str | None
) -> None:
    settings: dict[str, object] = {"local_prefill_threshold": 4, "local_prefill": mode}
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, **settings) as cluster:  # type: ignore[arg-type]
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


@pytest.mark.parametrize(("whose", "tier"), [("mine", "prefill"), ("another's", "decode")])
async def test_a_report_that_still_counts_a_prompt_of_this_router_keeps_no_prompt_from_an_idle_prefill_tier(
    redis_server: PrivateRedis, model_dir: object, whose: str, tier: str
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, local_prefill_threshold=4) as cluster:  # type: ignore[arg-type]
        await cluster.complete()
        router_id = RouterId(cluster.world.prefills[0].ref.router_id)
        assert router_id == cluster.world.decode_starts[0].ref.router_id != ""
        await reports_queued(cluster, router_id if whose == "mine" else RouterId(whose))
        _, body = await cluster.complete()
        assert (await cluster.trace(body["id"]))["prefilled_by"] == tier


async def reports_queued(cluster: ScriptedCluster, router_id: RouterId, tokens: int = 5000) -> None:
    """The router has a report of prefill-0 by which prompts of one router are queued there."""
    load = WorkerLoad(queued_tokens=tokens, queued_by_router={router_id: tokens}, prefill_tokens_per_s=1000.0)
    cluster.workers["prefill-0"].set(load=load)

    async def is_known() -> bool:
        return cluster.router.cluster.ready("prefill")[0].load == load

    await eventually(is_known)


@pytest.mark.parametrize("is_dead", [False, True])
async def test_a_prompt_whose_client_left_counts_as_reported_until_another_is_computed_or_the_worker_is_gone(
    small_cluster: ScriptedCluster, is_dead: bool
) -> None:
    in_flight = small_cluster.router.cluster.in_flight
    reached = asyncio.Event()

    async def reach_and_hang(context: Context) -> None:
        reached.set()
        await hang(context)

    small_cluster.script.fail("prefill", reach_and_hang)
    request = asyncio.create_task(small_cluster.complete())
    await reached.wait()
    request.cancel()
    await small_cluster.world.until(lambda: small_cluster.world.open_calls == 0)
    await reports_queued(small_cluster, in_flight.router_id)
    [prefill] = small_cluster.router.cluster.ready("prefill")
    assert queued_tokens(prefill, in_flight) == 5000
    if is_dead:
        small_cluster.router.cluster.directory.mark_lost(prefill.worker_id, prefill.epoch)

        async def is_forgotten() -> bool:
            return queued_tokens(prefill, in_flight) == 0

        await eventually(is_forgotten)
    else:
        await small_cluster.complete()
        assert queued_tokens(prefill, in_flight) == 0


@pytest.mark.parametrize("point", ["prefill_queued", "prefill_started"])
@pytest.mark.parametrize("cached_tokens", [0, 1])
async def test_of_a_prompt_that_is_not_cached_as_believed_counts_what_the_worker_tells(
    small_cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch, point: str, cached_tokens: int
) -> None:
    in_flight = small_cluster.router.cluster.in_flight
    believed = AsyncMock(return_value={WorkerId("prefill-0"): 1000})
    monkeypatch.setattr(Cluster, "overlap", believed)
    small_cluster.script.cached_tokens = cached_tokens
    counted: list[int] = []

    async def count(_: Context) -> None:
        missing = len(small_cluster.world.prefills[0].prompt_token_ids) - cached_tokens

        async def is_counted() -> bool:
            return in_flight.prompt_tokens(WorkerId("prefill-0")) == missing

        await eventually(is_counted)
        counted.append(missing)

    small_cluster.script.fail(point, count)
    await small_cluster.complete()
    assert len(counted) == 1
    assert counted[0] > 2
    assert in_flight.prompt_tokens(WorkerId("prefill-0")) == 0


async def test_a_prompt_that_no_prefill_worker_got_was_not_given_up_there(
    redis_server: PrivateRedis, model_dir: object
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, reserve_timeout_s=0.1) as cluster:  # type: ignore[arg-type]
        in_flight = cluster.router.cluster.in_flight
        cluster.script.fail("decode", *[failing(NoFreeBlocks("full"))] * 100)
        status, _ = await cluster.complete()
        assert (status, cluster.world.prefills) == (503, [])
        await reports_queued(cluster, in_flight.router_id)
        assert queued_tokens(cluster.router.cluster.ready("prefill")[0], in_flight) == 0


@pytest.mark.parametrize("fallback", ["no_prefill_worker", "not_receivable"])
async def test_a_prompt_that_the_decode_worker_has_to_compute_is_counted_there(
    redis_server: PrivateRedis, model_dir: object, fallback: str
) -> None:
    async with open_cluster(redis_server, model_dir, ONE_OF_EACH, local_prefill_threshold=1) as cluster:  # type: ignore[arg-type]
        in_flight = cluster.router.cluster.in_flight
        counted: list[tuple[int, int]] = []

        async def count(_: Context) -> None:
            tokens = len(cluster.world.decode_starts[0].prompt_token_ids)

            async def is_counted() -> bool:
                return in_flight.prompt_tokens(WorkerId("decode-0")) == tokens

            await eventually(is_counted)
            counted.append((tokens, in_flight.prompt_tokens(WorkerId("prefill-0"))))

        if fallback == "not_receivable":
            cluster.world.most_receivable = 2
            cluster.script.fail("decode_token", count)
        else:
            cluster.script.fail("prefill", failing(NoFreeBlocks("none")))
            cluster.script.fail("decode_local", count)
        text, _ = await cluster.stream()
        assert text == TEXT
        assert [there for _, there in counted] == [0]
        assert in_flight.prompt_tokens(WorkerId("decode-0")) == 0


@pytest.mark.parametrize(("expected", "fallbacks"), [(1, ["no_prefill_worker"]), (0, [])])
async def test_prefilling_on_decode_is_a_fallback_only_where_prefill_workers_were_meant(
    redis_server: PrivateRedis, model_dir: object, expected: int, fallbacks: list[str]
) -> None:
    async with open_cluster(redis_server, model_dir, {"decode-0": "decode"}, prefill_expected=expected) as cluster:  # type: ignore[arg-type]
        text, _ = await cluster.stream()
        assert text == TEXT
        assert cluster.world.decode_starts[0].local_prefill_threshold == ALWAYS_LOCAL
        record = await cluster.only_trace()
        assert [fallback["reason"] for fallback in record["fallbacks"]] == fallbacks
        assert record["local_prefill_reason"] == ("fallback" if fallbacks else "no_prefill_tier")
        assert bool(cluster.router.health.degraded) == bool(fallbacks)


async def test_a_stop_string_ends_one_choice_while_another_goes_on(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [tokens_of("one STOP two"), tokens_of("a longer text without it")]
    cluster.script.fail("decode_token", after_first_token(cluster, go_on))
    _, body = await cluster.complete(n=2, stop=["STOP"])
    first, second = body["choices"]
    assert (first["text"], first["finish_reason"], first["stop_reason"]) == ("one ", "stop", "STOP")
    assert (second["text"], second["finish_reason"]) == ("a longer text without it", "length")
    await cluster.world.until(lambda: "stop_choice" in cluster.world.commands)


async def test_progress_keeps_the_decode_workers_lease(cluster: ScriptedCluster) -> None:
    async def kept_three_times(_: Context) -> None:
        await cluster.world.until(lambda: cluster.world.commands.count("keep_lease") == 3)

    cluster.script.fail("prefill_token", kept_three_times)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert (await cluster.only_trace())["retries"] == []


@pytest.mark.parametrize("point", ["decode", "decode_ticket", "prefill", "prefill_token", "decode_started"])
async def test_a_client_that_goes_away_ends_the_work_in_every_phase(small_cluster: ScriptedCluster, point: str) -> None:
    reached = asyncio.Event()

    async def reach_and_hang(context: Context) -> None:
        reached.set()
        await hang(context)

    small_cluster.script.fail(point, reach_and_hang)
    request = asyncio.create_task(small_cluster.complete())
    await reached.wait()
    request.cancel()
    await small_cluster.world.until(lambda: small_cluster.world.open_calls == 0)
    record = await small_cluster.only_trace()
    assert record["state"] == "cancelled"
    assert await small_cluster.metric("num_requests_running") == 0


async def test_a_client_that_goes_away_in_mid_stream_ends_the_work(small_cluster: ScriptedCluster) -> None:
    small_cluster.script.pace = asyncio.Semaphore(2)
    url = f"{small_cluster.base_url}/v1/completions"
    async with small_cluster.http.post(url, json={"model": "tiny", "prompt": "x", "stream": True}) as response:
        await response.content.readline()
    await small_cluster.world.until(lambda: small_cluster.world.open_calls == 0)
    record = await small_cluster.only_trace()
    assert record["state"] == "cancelled"
