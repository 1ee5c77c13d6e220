"""Decode workers that compute other bits: answers that have begun stay with their class while one of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.workers import Tier
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import TEXT, after_first_token
from tests.integration.router_svc.script import Context, vanish
from tests.support.redis import eventually

FIVE: dict[str, Tier] = {
    "prefill-0": "prefill",
    "prefill-1": "prefill",
    "decode-0": "decode",
    "decode-1": "decode",
    "decode-2": "decode",
}
FOUR_DECODE: dict[str, Tier] = {"prefill-0": "prefill", **{f"decode-{index}": "decode" for index in range(4)}}
TWO: dict[str, Tier] = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


async def classify(cluster: ScriptedCluster, **classes: str) -> None:
    """Gives workers these numerics classes, and returns once the router knows them."""
    for name, numerics in classes.items():
        worker = cluster.workers[name.replace("_", "-")]
        worker.record = replace(worker.record, numerics_class=numerics)
        worker.registrar.announce()

    async def is_known() -> bool:
        ready = [worker for tier in ("prefill", "decode") for worker in cluster.router.cluster.ready(tier)]
        return {worker.worker_id: worker.numerics_class for worker in ready} == {
            name: worker.record.numerics_class for name, worker in cluster.workers.items()
        }

    await eventually(is_known)


async def test_an_answer_that_has_started_goes_on_in_its_class(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, FIVE) as cluster:
        # By cost and name the next best after decode-0 is decode-1.
        await classify(cluster, prefill_0="x", prefill_1="y", decode_0="y", decode_1="x", decode_2="y")
        cluster.script.fail("decode_started", after_first_token(cluster, vanish))
        text, _ = await cluster.stream()
        assert text == TEXT
        record = await cluster.only_trace()
        assert [each["worker"] for each in record["decisions"] if each["tier"] == "decode"] == ["decode-0", "decode-2"]
        assert {each["worker"] for each in record["decisions"] if each["tier"] == "prefill"} == {"prefill-1"}
        assert await cluster.metric("numerics_changes_total") == 0


async def test_a_worker_of_another_class_that_adds_no_token_leaves_the_class_as_it_is(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, FOUR_DECODE, worker_return_timeout_s=0) as cluster:
        # decode-3 is not ready when decode-0 is lost: decode-1 gets the request, and is lost before it has sampled.
        await classify(cluster, decode_0="x", decode_1="y", decode_2="y", decode_3="x")

        async def are_ready(count: int) -> None:
            async def is_known() -> bool:
                return len(cluster.router.cluster.ready("decode")) == count

            await eventually(is_known)

        cluster.workers["decode-3"].set(ready=False)
        await are_ready(3)

        async def come_back(context: Context) -> None:
            cluster.workers["decode-3"].set(ready=True)
            await are_ready(3)  # Without decode-0.
            await vanish(context)

        cluster.script.fail("decode_started", after_first_token(cluster, vanish))
        cluster.script.fail("decode", None, come_back)
        text, _ = await cluster.stream()
        assert text == TEXT
        record = await cluster.only_trace()
        decisions = [each["worker"] for each in record["decisions"] if each["tier"] == "decode"]
        assert decisions == ["decode-0", "decode-1", "decode-3"]


async def test_an_answer_waits_for_a_worker_of_its_class_that_is_about_to_return(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, FIVE) as cluster:
        await classify(cluster, decode_0="x", decode_1="y", decode_2="x")
        cluster.workers["decode-2"].set(ready=False)

        def has_ready(*names: str) -> Callable[[], Awaitable[bool]]:
            async def is_so() -> bool:
                return {worker.worker_id for worker in cluster.router.cluster.ready("decode")} == set(names)

            return is_so

        async def is_waiting() -> bool:
            return bool((await cluster.only_trace())["retries"]) and await has_ready("decode-1")()

        async def vanish_for_a_time(context: Context) -> None:
            returning.append(asyncio.ensure_future(come_back()))
            await vanish(context)

        async def come_back() -> None:
            await eventually(is_waiting)
            cluster.workers["decode-2"].set(ready=True)

        await eventually(has_ready("decode-0", "decode-1"))
        returning: list[asyncio.Future[None]] = []
        cluster.script.fail("decode_started", after_first_token(cluster, vanish_for_a_time))
        text, _ = await cluster.stream()
        await asyncio.gather(*returning)
        assert text == TEXT
        record = await cluster.only_trace()
        assert [each["worker"] for each in record["decisions"] if each["tier"] == "decode"] == ["decode-0", "decode-2"]
        assert await cluster.metric("numerics_changes_total") == 0


async def test_where_only_another_class_is_left_an_answer_goes_on_and_says_so(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, TWO, worker_return_timeout_s=0) as cluster:
        await classify(cluster, decode_0="avx512", decode_1="avx2")
        cluster.script.fail("decode_started", after_first_token(cluster, vanish))
        text, _ = await cluster.stream()
        assert text == TEXT
        record = await cluster.only_trace()
        last = [each for each in record["decisions"] if each["tier"] == "decode"][-1]
        assert last["worker"] == "decode-1"
        assert "numerics change from avx512 to avx2" in last["why"]
        assert await cluster.metric("numerics_changes_total") == 1


async def test_or_ends_with_an_error_that_names_both_classes(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(
        redis_server, model_dir, TWO, on_numerics_change="error", worker_return_timeout_s=0
    ) as cluster:
        await classify(cluster, decode_0="avx512", decode_1="avx2")
        cluster.script.fail("decode_started", after_first_token(cluster, vanish))
        status, body = await cluster.complete()
        assert status == 503
        message = body["error"]["message"]
        assert "class avx512 are lost" in message
        assert "avx2" in message
        assert "--on-numerics-change" in message
        assert await cluster.metric("numerics_changes_total") == 0
