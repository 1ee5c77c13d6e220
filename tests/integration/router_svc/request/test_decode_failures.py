"""Faults of decode workers, as a client sees them over HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import pytest

from pdserve.base.errors import NoFreeBlocks, StaleEpoch, TransferTimeout
from pdserve.base.ids import WorkerId, new_epoch
from pdserve.cli.private_redis import PrivateRedis
from pdserve.net.streams import MessageStream
from pdserve.peers.registry import Tier
from pdserve.v1 import decode_pb2
from router_svc.request import output
from router_svc.routing.cluster import Cluster
from tests.integration.router_svc.conftest import TWO_OF_EACH, ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import (
    TEXT,
    TOKENS,
    after_first_token,
    announce_keep_alives,
)
from tests.integration.router_svc.script import Context, Fault, failing, hang, leave, silent_for, vanish
from tests.support.deadline import DEADLINE_S
from tests.support.redis import eventually, until
from tests.support.tiny_model import END, NAME
from tests.support.virtual_time import advance

#: A limit that a test lets pass. No processor that is late by less looks like a silent worker.
TIMEOUT_S = 30.0


async def test_a_decode_worker_that_omits_tokens_is_replaced_by_one_that_has_them(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode_token", None, after_first_token(cluster, leave))
    text, _ = await cluster.stream()
    assert text == TEXT
    [retry] = (await cluster.only_trace())["retries"]
    assert retry["reason"] == "peer_lost"


@pytest.mark.parametrize("point", ["decode", "decode_ticket"])
async def test_a_decode_worker_lost_before_anything_was_streamed_is_replaced(
    cluster: ScriptedCluster, point: str
) -> None:
    cluster.script.fail(point, vanish)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert [start.ref.attempt for start in cluster.calls.decode_starts] == [1, 2]
    record = await cluster.only_trace()
    assert record["decisions"][0]["worker"] != record["decisions"][1]["worker"]


async def test_a_decode_worker_lost_after_the_first_token_is_replaced_by_one_that_continues(
    cluster: ScriptedCluster,
) -> None:
    cluster.script.fail("decode_started", after_first_token(cluster, vanish))
    text, _ = await cluster.stream()
    assert text == TEXT
    assert list(cluster.calls.prefills[1].forced_first_tokens) == TOKENS[:1]


async def test_a_request_that_lost_its_worker_keeps_its_age(cluster: ScriptedCluster) -> None:
    async def vanish_later(context: Context) -> None:
        await asyncio.sleep(0.05)
        await vanish(context)

    cluster.script.fail("decode", vanish_later)
    await cluster.stream()
    first, second = cluster.calls.decode_starts
    assert second.ref.waited_ms >= first.ref.waited_ms + 50


@pytest.mark.parametrize("point", ["decode_started", "decode_token"])
async def test_an_output_with_log_probabilities_goes_on_at_the_first_attempt(
    cluster: ScriptedCluster, point: str
) -> None:
    """The prefill worker repeats the first token, which it was given, without log-probabilities."""
    cluster.script.fail(point, after_first_token(cluster, vanish))
    status, answer = await cluster.complete(logprobs=2)
    assert status == HTTPStatus.OK
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == len(TOKENS)
    assert [retry["reason"] for retry in (await cluster.only_trace())["retries"]] == ["peer_lost"]


async def test_a_stream_goes_on_when_its_decode_worker_is_lost(cluster: ScriptedCluster) -> None:
    """The next worker goes on behind the tokens that the client has. Fails if it is not given them."""
    cluster.script.fail("decode_token", None, None, after_first_token(cluster, vanish))
    text, events = await cluster.stream()
    assert text == TEXT
    assert "error" not in events[-1]
    first, second = cluster.calls.decode_starts
    assert not first.output
    [continued] = second.output
    assert (continued.choice_index, list(continued.token_ids), continued.is_over) == (0, TOKENS[:3], False)
    assert await cluster.metric("stream_pause_seconds_count") == 1
    assert await cluster.metric("recoveries_total", reason="peer_lost") == 1
    record = await cluster.only_trace()
    assert record["state"] == "finished"
    assert [retry["reason"] for retry in record["retries"]] == ["peer_lost"]
    assert [(pause["reason"], pause["completion_tokens"]) for pause in record["pauses"]] == [("peer_lost", 3)]


async def test_a_retry_goes_where_the_prompt_is_cached_by_then(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails when the index is asked once, before any worker has computed the prompt."""

    async def overlap(*_: object) -> dict[WorkerId, int]:
        return {WorkerId("prefill-0" if cluster.calls.prefills else "prefill-1"): 1}

    monkeypatch.setattr(Cluster, "overlap", overlap)
    cluster.script.fail("decode_token", None, after_first_token(cluster, vanish))
    text, _ = await cluster.stream()
    assert text == TEXT
    workers = [decision["worker"] for decision in (await cluster.only_trace())["decisions"]]
    assert [worker for worker in workers if worker.startswith("prefill")] == ["prefill-1", "prefill-0"]


async def test_choices_that_are_over_are_not_decoded_again(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [[*TOKENS[:1], END], TOKENS]
    cluster.script.fail("decode_token", None, None, None, after_first_token(cluster, vanish))
    status, body = await cluster.complete(n=2)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == [TEXT[:1], TEXT]
    over, going_on = cluster.calls.decode_starts[-1].output
    assert (over.choice_index, list(over.token_ids), over.is_over) == (0, [], True)
    assert (going_on.choice_index, going_on.is_over) == (1, False)
    assert list(going_on.token_ids) == TOKENS[: len(going_on.token_ids)]
    assert body["usage"]["completion_tokens"] == 2 + len(TOKENS)


async def test_a_response_is_complete_when_its_decode_worker_is_lost(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode_token", None, after_first_token(cluster, vanish))
    status, body = await cluster.complete()
    assert status == 200
    assert body["choices"][0]["text"] == TEXT
    assert body["usage"]["completion_tokens"] == len(TOKENS)


async def test_a_very_long_output_is_sampled_again(cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "MAX_CONTINUED_TOKENS", 2)
    cluster.script.fail("decode_token", None, None, after_first_token(cluster, vanish))
    text, _ = await cluster.stream()
    assert text == TEXT
    assert not cluster.calls.decode_starts[-1].output


async def test_a_reservation_that_expires_is_renewed_without_the_prefill_worker_that_failed(
    small_cluster: ScriptedCluster,
) -> None:
    """The prefill worker fails when the lease on a healthy decode worker expires."""

    async def expire(context: Context) -> None:
        await small_cluster.calls.until(lambda: bool(small_cluster.calls.prefills))
        await failing(TransferTimeout("no progress for 5 s"))(context)

    small_cluster.script.fail("prefill", failing(TransferTimeout("nothing got through")))
    small_cluster.script.fail("decode_local", expire)
    text, _ = await small_cluster.stream()
    assert text == TEXT
    assert len(small_cluster.calls.prefills) == 1
    record = await small_cluster.only_trace()
    assert [decision["worker"] for decision in record["decisions"]] == ["decode-0", "prefill-0", "decode-0"]
    assert record["prefilled_by"] == "decode"


async def test_a_request_that_loses_all_decode_workers_waits_until_one_is_back(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode", vanish, vanish)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert len(cluster.calls.decode_starts) == 3


async def test_a_request_that_arrives_while_no_decode_worker_is_ready_waits_until_one_is_back(
    small_cluster: ScriptedCluster,
) -> None:
    directory = small_cluster.router.cluster.directory
    [worker] = directory.workers_of("decode")
    directory.mark_lost(worker.worker_id, worker.epoch)
    assert not small_cluster.router.cluster.ready("decode")
    text, _ = await small_cluster.stream()
    assert text == TEXT


@pytest.mark.parametrize(
    ("point", "fault"),
    [
        ("decode_ticket", vanish),
        ("decode_token", vanish),
        # What a worker says that started anew, before the registry knows.
        ("decode_ticket", failing(StaleEpoch("Worker decode-0 has started anew."))),
    ],
)
async def test_where_no_decode_worker_is_expected_back_a_loss_is_an_error_at_once(
    redis_server: PrivateRedis, model_dir: Path, point: str, fault: Fault
) -> None:
    async with open_cluster(
        redis_server, model_dir, {"prefill-0": "prefill", "decode-0": "decode"}, worker_return_timeout_s=0
    ) as cluster:

        async def leaving(context: Context) -> None:
            cluster.workers["decode-0"].set(ready=False)
            await until(cluster.router.cluster.directory, lambda: not cluster.router.cluster.ready("decode"))
            await fault(context)

        lose = vanish if fault is vanish else leaving
        cluster.script.fail(point, lose if point == "decode_ticket" else after_first_token(cluster, lose))
        for lost in (True, False):
            body = {"model": NAME, "prompt": "Say hello", "max_tokens": 50}
            async with cluster.http.post(f"{cluster.base_url}/v1/completions", json=body) as response:
                message = (await response.json())["error"]["message"]
                assert (response.status, "Retry-After" in response.headers) == (503, True)
            assert "No decode worker is ready" in message
            assert ("decode-0" in message) == lost


async def _lose_tier(cluster: ScriptedCluster) -> None:
    """The only decode worker is lost behind the first token, and no other one comes."""

    async def lose(context: Context) -> None:
        cluster.workers["decode-0"].set(ready=False)
        await until(cluster.router.cluster.directory, lambda: not cluster.router.cluster.ready("decode"))
        await vanish(context)

    cluster.script.fail("decode_token", None, after_first_token(cluster, lose))


async def _is_retrying(cluster: ScriptedCluster) -> bool:
    return bool((await cluster.only_trace())["retries"])


async def _stream_across_an_outage(cluster: ScriptedCluster) -> None:
    """A stream whose tier is gone for three times `TIMEOUT_S`: it waits, and is whole once the tier is back."""
    streaming = asyncio.create_task(cluster.stream())
    await cluster.calls.until(lambda: bool(cluster.calls.decode_starts))
    await eventually(lambda: _is_retrying(cluster))
    for _ in range(3):
        advance(TIMEOUT_S)
        await cluster.only_trace()
    assert not streaming.done()
    cluster.workers["decode-0"].set(ready=True)
    text, _ = await streaming
    assert text == TEXT


@pytest.mark.advanced_time
async def test_a_stream_waits_for_a_tier_that_is_gone_until_its_own_deadline(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    """Fails if `--worker-return-timeout-s` ends it: a worker may take longer to load than anyone has guessed."""
    tiers: dict[str, Tier] = {"prefill-0": "prefill", "decode-0": "decode"}
    async with open_cluster(redis_server, model_dir, tiers, worker_return_timeout_s=TIMEOUT_S) as cluster:
        await _lose_tier(cluster)
        await _stream_across_an_outage(cluster)


@pytest.mark.advanced_time
async def test_a_request_that_waits_for_capacity_waits_for_the_whole_tier_too(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    """Fails if the limit for capacity goes on while there is no worker."""
    tiers: dict[str, Tier] = {"decode-0": "decode"}
    async with open_cluster(redis_server, model_dir, tiers, reserve_timeout_s=TIMEOUT_S) as cluster:

        async def refuse_and_leave(context: Context) -> None:
            cluster.workers["decode-0"].set(ready=False)
            await until(cluster.router.cluster.directory, lambda: not cluster.router.cluster.ready("decode"))
            await failing(NoFreeBlocks("full"))(context)

        cluster.script.fail("decode", refuse_and_leave, failing(NoFreeBlocks("full")))
        await _stream_across_an_outage(cluster)
        assert len(cluster.calls.decode_starts) == 3


async def test_the_error_of_a_request_out_of_time_says_that_no_worker_is_ready(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    tiers: dict[str, Tier] = {"prefill-0": "prefill", "decode-0": "decode"}
    async with open_cluster(redis_server, model_dir, tiers) as cluster:
        await _lose_tier(cluster)
        status, body = await cluster.complete(timeout=2)
        assert status == HTTPStatus.GATEWAY_TIMEOUT
        assert "no decode worker is ready" in body["error"]["message"]


async def test_a_decode_worker_that_lives_and_cannot_be_reached_is_given_up(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    """Its heartbeats prove each time that it is back. Fails if each failure begins another wait."""
    tiers: dict[str, Tier] = {"prefill-0": "prefill", "decode-0": "decode"}
    async with open_cluster(redis_server, model_dir, tiers, worker_return_timeout_s=1.5) as cluster:
        worker = cluster.workers["decode-0"]
        worker.record = replace(worker.record, stream_address="127.0.0.1:1")
        worker.registrar.announce()
        directory = cluster.router.cluster.directory
        while directory.workers_of("decode")[0].stream_address != "127.0.0.1:1":
            await directory.wait_for_change()
        async with asyncio.timeout(DEADLINE_S):
            status, body = await cluster.complete()
        assert status == 503
        assert "decode-0" in body["error"]["message"]


@pytest.mark.advanced_time
async def test_a_decode_worker_that_dies_and_is_started_anew_each_time_is_waited_for(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    """Fails if a wait begins anew only behind an answer: a worker that is killed while it loads gives none."""
    tiers: dict[str, Tier] = {"prefill-0": "prefill", "decode-0": "decode"}
    async with open_cluster(redis_server, model_dir, tiers, worker_return_timeout_s=TIMEOUT_S) as cluster:
        worker = cluster.workers["decode-0"]

        async def start_anew(context: Context) -> None:
            worker.record = replace(worker.record, epoch=new_epoch())
            worker.registrar.announce()
            advance(TIMEOUT_S / 3)
            await vanish(context)

        cluster.script.fail("decode", *[start_anew] * 5)
        text, _ = await cluster.stream()
        assert text == TEXT


async def test_a_decode_worker_that_refuses_is_replaced(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode", failing(NoFreeBlocks("full")))
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert [retry["reason"] for retry in record["retries"]] == ["no_free_blocks"]


async def test_when_all_decode_workers_are_full_the_request_waits_for_capacity(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    # No limit of this request may pass while the test waits for a processor.
    async with open_cluster(
        redis_server, model_dir, TWO_OF_EACH, reserve_timeout_s=600, token_timeout_s=600, silence_timeout_s=600
    ) as cluster:
        cluster.script.fail("decode", *[failing(NoFreeBlocks("full"))] * 4)
        text, _ = await cluster.stream()
        assert text == TEXT
        assert len(cluster.calls.decode_starts) == 5


async def test_a_request_that_waits_too_long_for_capacity_fails(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, {"decode-0": "decode"}, reserve_timeout_s=0.5) as cluster:
        cluster.script.fail("decode", *[failing(NoFreeBlocks("full"))] * 1000)
        async with cluster.http.post(
            f"{cluster.base_url}/v1/completions", json={"model": "tiny", "prompt": "x"}
        ) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"


@pytest.mark.advanced_time
async def test_a_stream_waits_for_capacity_from_its_last_loss_on(redis_server: PrivateRedis, model_dir: Path) -> None:
    """Fails if the time counts from its arrival: a stream that has run for longer would end with its worker."""
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH, reserve_timeout_s=2.0) as cluster:

        async def outlast(context: Context) -> None:
            advance(2.1)
            await vanish(context)

        cluster.script.fail("decode_token", None, after_first_token(cluster, outlast))
        cluster.script.fail("decode", None, *[failing(NoFreeBlocks("full"))] * 2)
        text, _ = await cluster.stream()
        assert text == TEXT


@pytest.mark.advanced_time
async def test_a_decode_worker_that_never_grants_a_ticket_is_replaced(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH, reserve_timeout_s=TIMEOUT_S) as cluster:
        cluster.script.fail("decode_ticket", silent_for(TIMEOUT_S))
        text, _ = await cluster.stream()
        assert text == TEXT
        assert len(cluster.calls.decode_starts) == 2
        assert len(cluster.calls.prefills) == 1, "a decode worker without blocks keeps no prefill worker idle"


@pytest.mark.advanced_time
@pytest.mark.parametrize("point", ["decode", "decode_ticket", "decode_started"])
async def test_silence_before_decoding_is_noticed_by_the_missing_keep_alives(
    redis_server: PrivateRedis, model_dir: Path, point: str
) -> None:
    async with open_cluster(
        redis_server, model_dir, TWO_OF_EACH, silence_timeout_s=TIMEOUT_S, reserve_timeout_s=600, token_timeout_s=600
    ) as cluster:
        await announce_keep_alives(cluster)
        for worker in cluster.workers.values():
            worker.registrar._heartbeat_s = 1e9
        cluster.script.fail(point, silent_for(TIMEOUT_S))
        text, _ = await cluster.stream()
        assert text == TEXT
        assert len(cluster.calls.decode_starts) == 2
        # It does not answer, so other requests avoid it, too.
        assert len(cluster.router.cluster.ready("decode")) == 1


async def test_a_worker_that_ends_its_stream_is_not_lost_when_it_closes_it(small_cluster: ScriptedCluster) -> None:
    cluster = small_cluster
    cluster.script.says_end = True

    async def once_closed(_: Context) -> None:
        [committed] = cluster.calls.commits.values()
        committed.set()
        await cluster.calls.until(lambda: cluster.calls.num_decoded == 1 and cluster.calls.num_open == 1)

    cluster.script.fail("prefill_token", once_closed)
    text, _ = await cluster.stream()
    assert text == TEXT
    assert (await cluster.only_trace())["retries"] == []


@pytest.mark.parametrize("times", [1, 2])
async def test_a_worker_that_ends_with_tokens_missing_gets_a_second_attempt_and_no_third(
    small_cluster: ScriptedCluster, times: int
) -> None:
    early = after_first_token(small_cluster, end_early)
    small_cluster.script.fail("decode_token", None, *[early] * times)
    status, body = await small_cluster.complete()
    assert status == (200 if times == 1 else 502)
    text = body["choices"][0]["text"] if times == 1 else body["error"]["message"]
    assert (TEXT if times == 1 else "before every choice was complete") in text


async def end_early(context: Context) -> None:
    """The worker says that it has sent everything."""
    assert isinstance(context, MessageStream)
    await context.write(decode_pb2.DecodeResponse(ended=decode_pb2.DecodeEnded()))
    await hang(context)


@pytest.mark.advanced_time
async def test_a_decode_worker_that_falls_silent_is_replaced(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH, token_timeout_s=TIMEOUT_S) as cluster:
        cluster.script.fail("decode_token", None, after_first_token(cluster, silent_for(TIMEOUT_S)))
        text, _ = await cluster.stream()
        assert text == TEXT
        [retry] = (await cluster.only_trace())["retries"]
        assert retry["reason"] == "transfer_timeout"
