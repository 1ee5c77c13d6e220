"""Requests with a grammar go to workers that read it."""

from __future__ import annotations

from pathlib import Path

from pdserve.base.wire import sampling_from_wire
from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.conftest import TWO_OF_EACH, ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import TEXT
from tests.support.redis import until


async def _no_longer_read(cluster: ScriptedCluster, *workers: str) -> None:
    """An older version of these workers: they would ignore a grammar."""
    for name in workers:
        cluster.workers[name].set(reads_grammars=False)
    known = cluster.router.cluster
    await until(
        known.directory,
        lambda: (
            not any(each.reads_grammars for each in known.ready("decode") if each.worker_id in workers)
            and not any(each.reads_grammars for each in known.ready("prefill") if each.worker_id in workers)
        ),
    )


async def test_workers_of_both_tiers_get_the_same_grammar_and_older_ones_get_none(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH) as cluster:
        await _no_longer_read(cluster, "prefill-0", "decode-0")
        for _ in range(3):
            status, _ = await cluster.complete(guided_regex="[A-Za-z .]+")
            assert status == 200
        record = await cluster.trace(cluster.calls.prefills[-1].ref.request_id)
        assert {each["worker"] for each in record["decisions"]} == {"prefill-1", "decode-1"}
        grammars = {sampling_from_wire(each.sampling).grammar for each in cluster.calls.prefills}
        assert grammars == {sampling_from_wire(each.sampling).grammar for each in cluster.calls.decode_starts}
        assert len(grammars) == 1
        assert "[A-Za-z .]+" in grammars.pop()


async def test_without_a_worker_that_reads_grammars_the_answer_says_so(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, {"decode-0": "decode"}, worker_return_timeout_s=0) as cluster:
        await _no_longer_read(cluster, "decode-0")
        status, body = await cluster.complete(guided_regex="[a-z]+")
        assert status == 503
        assert "structured output" in body["error"]["message"]
        assert (await cluster.stream())[0] == TEXT
