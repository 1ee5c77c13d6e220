"""Requests that move from one decode worker to another while they run, as a client sees them over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pdserve.base.errors import Draining, StaleError
from pdserve.base.sampling import ChoiceTokens
from pdserve.base.wire import tokens_to_wire
from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.workers import WorkerLoad
from pdserve.v1 import decode_pb2
from tests.integration.router_svc.conftest import TWO_OF_EACH, ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import TEXT, TOKENS, after_first_token, both, once_known
from tests.integration.router_svc.script import Context, failing, hang, vanish
from tests.support.redis import eventually
from tests.support.tiny_model import END


def asks_to_leave(reason: str = "drain") -> Callable[[Context], Awaitable[None]]:
    """The worker asks that the request moves."""

    async def ask(stream: Any) -> None:
        await stream.write(decode_pb2.DecodeResponse(leave=decode_pb2.LeaveRequested(reason=reason)))

    return ask


def once_moved(cluster: ScriptedCluster, count: int = 1) -> Callable[[Context], Awaitable[None]]:
    """Waits until the router has given up, or ended, so many moves."""

    async def have_ended() -> bool:
        migrations = (await cluster.only_trace())["migrations"]
        return len([each for each in migrations if each["outcome"]]) >= count

    async def wait(_: Context) -> None:
        await eventually(have_ended)

    return wait


async def test_a_request_moves_when_its_worker_asks_to_be_left(cluster: ScriptedCluster) -> None:
    """The source is silent from then on: without a move, the stream would not end."""
    cluster.script.fail("decode_token", None, None, both(after_first_token(cluster, asks_to_leave()), hang))
    text, _ = await cluster.stream()
    assert text == TEXT
    first, second = cluster.calls.decode_starts
    assert (first.is_moving, second.is_moving) == (False, True)
    [output] = second.output
    assert list(output.token_ids) == TOKENS[: len(output.token_ids)]
    assert first.ref.attempt == second.ref.attempt
    record = await cluster.only_trace()
    [move] = record["migrations"]
    assert (move["reason"], move["outcome"], move["is_copied"], move["sent_blocks"]) == ("drain", "moved", True, 3)
    assert move["pause_s"] is not None
    assert move["target"] != move["source"]
    assert not record["retries"]
    assert await cluster.metric("migrations_total", reason="drain", outcome="moved") == 1
    assert await cluster.metric("migration_pause_seconds_count") == 1
    assert await cluster.metric("stream_pause_seconds_count") == 0
    assert await cluster.metric("recoveries_total") == 0


async def test_tokens_that_a_grammar_may_have_forced_last_are_computed_by_the_worker_that_gets_the_request(
    cluster: ScriptedCluster,
) -> None:
    """The client has them before the first worker has computed them, so that it could not send their blocks."""
    cluster.script.replies = [TOKENS[:1] * 60 + [END]]
    leaves = once_known(cluster, lambda record: record["outcome"]["completion_tokens"] >= 40, asks_to_leave())
    cluster.script.fail("decode_token", *[None] * 39, both(leaves, hang))
    status, body = await cluster.complete(max_tokens=100, structured_outputs={"regex": "H*"})
    assert (status, body["choices"][0]["text"]) == (200, TEXT[:1] * 60)
    _, second = cluster.calls.decode_starts
    assert [list(each.token_ids) for each in second.output] == [TOKENS[:1] * 24]
    [move] = (await cluster.only_trace())["migrations"]
    assert (move["outcome"], move["is_copied"]) == ("moved", True)


async def test_tokens_of_both_workers_reach_the_client_once(cluster: ScriptedCluster) -> None:
    """The source goes on while the other one catches up: fails if a token is lost between them, or comes twice."""
    cluster.script.replies = [TOKENS[:2] * 20 + [END], TOKENS[:3] * 15 + [END]]
    cluster.script.fail("decode_token", None, after_first_token(cluster, asks_to_leave()))
    status, body = await cluster.complete(n=2, max_tokens=100)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == [TEXT[:2] * 20, TEXT[:3] * 15]
    assert body["usage"]["completion_tokens"] == 41 + 46


async def test_a_request_stays_when_the_worker_that_it_moves_to_is_lost(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode_ticket", None, vanish)
    cluster.script.fail(
        "decode_token", None, both(after_first_token(cluster, asks_to_leave()), once_moved(cluster)), None
    )
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert record["migrations"][0]["outcome"] == "failed"
    assert not record["retries"]


async def test_a_worker_that_has_no_blocks_for_a_request_in_time_does_not_get_it(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    """The request goes on where it is. Fails if it waits for the other worker's ticket for good."""
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH, reserve_timeout_s=0.2) as cluster:
        cluster.script.fail("decode_ticket", None, hang)
        cluster.script.fail(
            "decode_token", None, both(after_first_token(cluster, asks_to_leave()), once_moved(cluster)), None
        )
        text, _ = await cluster.stream()
        assert text == TEXT
        [move] = (await cluster.only_trace())["migrations"]
        assert move["outcome"] == "failed"
        assert "no free blocks" in move["error"]


async def test_blocks_that_cannot_be_sent_are_computed_again(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode_hand_off", failing(StaleError("it was preempted")))
    cluster.script.fail("decode_token", None, both(after_first_token(cluster, asks_to_leave()), hang))
    text, _ = await cluster.stream()
    assert text == TEXT
    moves = (await cluster.only_trace())["migrations"]
    assert [(move["outcome"], move["is_copied"]) for move in moves] == [("failed", True), ("moved", False)]
    assert moves[0]["error"] == "it was preempted"
    assert cluster.calls.decode_starts[-1].local_prefill_threshold == 2**32 - 1


async def test_the_worker_that_a_request_moves_to_goes_on_when_the_other_is_lost(cluster: ScriptedCluster) -> None:
    """It has sampled a token of one of two choices by then: it runs, and has not caught up."""

    async def one_token(stream: Any) -> None:
        token = ChoiceTokens(choice_index=0, first_index=1, token_ids=(TOKENS[1],))
        tokens = decode_pb2.DecodeTokens(choices=[tokens_to_wire(token)])
        await stream.write(decode_pb2.DecodeResponse(tokens=tokens))
        await once_moved(cluster)(stream)

    async def once_it_runs(context: Context) -> None:
        async def has_token() -> bool:
            return bool((await cluster.only_trace())["outcome"]["completion_tokens"] == 3)

        await eventually(has_token)
        await vanish(context)

    cluster.script.fail("decode_moved_token", one_token)
    cluster.script.fail("decode_token", both(after_first_token(cluster, asks_to_leave()), once_it_runs))
    status, body = await cluster.complete(n=2)
    assert status == 200
    assert [choice["text"] for choice in body["choices"]] == [TEXT, TEXT]
    record = await cluster.only_trace()
    assert [move["outcome"] for move in record["migrations"]] == ["source_lost"]
    assert not record["retries"]


async def test_a_request_stays_where_tokens_are_others_elsewhere(cluster: ScriptedCluster) -> None:
    async def other_token(stream: Any) -> None:
        wrong = ChoiceTokens(choice_index=0, first_index=1, token_ids=(TOKENS[1] + 1,))
        tokens = decode_pb2.DecodeTokens(choices=[tokens_to_wire(wrong)])
        await stream.write(decode_pb2.DecodeResponse(tokens=tokens))
        await hang(stream)

    cluster.script.fail("decode_moved_token", other_token)
    cluster.script.fail(
        "decode_token", None, both(after_first_token(cluster, asks_to_leave("rebalance")), once_moved(cluster))
    )
    text, _ = await cluster.stream()
    assert text == TEXT
    [move] = (await cluster.only_trace())["migrations"][:1]
    assert (move["outcome"], "other tokens" in move["error"]) == ("failed", True)


async def test_nothing_moves_from_a_full_worker_to_one_without_room(cluster: ScriptedCluster) -> None:
    for worker in cluster.workers.values():
        worker.set(load=WorkerLoad(free_blocks=3))

    async def is_known() -> bool:
        return all(worker.load.free_blocks == 3 for worker in cluster.router.cluster.ready("decode"))

    await eventually(is_known)
    cluster.script.fail("decode_token", None, after_first_token(cluster, asks_to_leave("full")))
    text, _ = await cluster.stream()
    assert text == TEXT
    assert len(cluster.calls.decode_starts) == 1
    assert not (await cluster.only_trace())["migrations"]


async def test_a_request_moves_from_a_full_worker_to_one_with_room(cluster: ScriptedCluster) -> None:
    """The full one is silent from then on. Fails if its request has to wait there until blocks are free."""

    async def is_full(_: Context) -> None:
        [source] = [each["worker"] for each in (await cluster.only_trace())["decisions"] if each["tier"] == "decode"]
        cluster.workers[source].set(load=WorkerLoad(free_blocks=0))

    asks = both(after_first_token(cluster, is_full), both(asks_to_leave("full"), hang))
    cluster.script.fail("decode_token", None, None, asks)
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    [move] = record["migrations"]
    assert (move["reason"], move["outcome"], move["is_copied"]) == ("full", "moved", True)
    assert not record["retries"]
    assert await cluster.metric("migrations_total", reason="full", outcome="moved") == 1


async def test_a_worker_that_gives_a_request_up_at_the_end_of_its_drain_is_not_lost(cluster: ScriptedCluster) -> None:
    cluster.script.fail("decode_token", None, None, after_first_token(cluster, failing(Draining("it ends"))))
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert [retry["reason"] for retry in record["retries"]] == ["draining"]


async def test_prompts_that_draining_workers_hand_back_are_computed_by_another_one(cluster: ScriptedCluster) -> None:
    """Two have handed it back: fails if that counts as two failures, after which the decode worker computes it."""
    cluster.script.fail("prefill", failing(Draining("it ends")))
    text, _ = await cluster.stream()
    assert text == TEXT
    record = await cluster.only_trace()
    assert [retry["reason"] for retry in record["retries"]] == ["draining"]
    assert record["prefilled_by"] == "prefill"
