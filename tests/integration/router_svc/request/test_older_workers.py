"""What came later goes to workers that know it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.base.wire import sampling_from_wire
from pdserve.cli.private_redis import PrivateRedis
from tests.integration.router_svc.conftest import TWO_OF_EACH, ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import TEXT
from tests.integration.router_svc.script import Context
from tests.support.redis import until
from tests.support.tiny_model import NAME, tokens_of

RULES = {
    "allowed_token_ids": [*tokens_of(TEXT), 200],
    "bad_words": ["ab", " c"],
    "logprobs": 1,
    "logprob_token_ids": [9, 7, 9],
}


async def _made_older(cluster: ScriptedCluster, *workers: str) -> None:
    """These workers know none of the later fields: they would ignore them."""
    for name in workers:
        cluster.workers[name].set(sampling_version=0)
    known = cluster.router.cluster
    await until(
        known.directory,
        lambda: (
            not any(
                each.sampling_version
                for each in (*known.ready("prefill"), *known.ready("decode"))
                if each.worker_id in workers
            )
        ),
    )


async def test_workers_of_both_tiers_get_the_fields_and_older_ones_no_such_request(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH) as cluster:
        await _made_older(cluster, "prefill-0", "decode-0")
        for _ in range(3):
            assert (await cluster.complete(**RULES))[0] == 200
        record = await cluster.trace(cluster.calls.prefills[-1].ref.request_id)
        assert {each["worker"] for each in record["decisions"]} == {"prefill-1", "decode-1"}
        for message in (*cluster.calls.prefills, *cluster.calls.decode_starts):
            sampling = sampling_from_wire(message.sampling)
            assert sampling.allowed_token_ids == tuple(RULES["allowed_token_ids"])
            assert sampling.logprob_token_ids == (9, 7)
            # Each as at the start of a text and behind a space.
            assert sampling.bad_words == tuple(tuple(tokens_of(text)) for text in ("ab", " ab", "c", " c"))


@pytest.mark.parametrize(("pooled", "version"), [(False, 2), (True, 3)], ids=["scored", "pooled"])
async def test_prefill_workers_that_would_sample_instead_get_no_prompt_without_output(
    redis_server: PrivateRedis, model_dir: Path, pooled: bool, version: int
) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH) as cluster:
        cluster.workers["prefill-0"].set(sampling_version=version - 1)
        cluster.workers["prefill-1"].set(sampling_version=version)
        known = cluster.router.cluster
        await until(
            known.directory,
            lambda: {each.sampling_version for each in known.ready("prefill")} == {version - 1, version},
        )
        for _ in range(3):
            if pooled:
                status, body = await cluster.post("/v1/embeddings", {"model": NAME, "input": "Say hello"})
            else:
                status, body = await cluster.complete(prompt_logprobs=1, max_tokens=0, echo=True)
            assert status == 200, body
            record = await cluster.trace(cluster.calls.prefills[-1].ref.request_id)
            assert {each["worker"] for each in record["decisions"]} == {"prefill-1"}


async def _asking(cluster: ScriptedCluster, **asks: bool) -> None:
    """Whether these workers ask for data addresses."""
    named = {name.replace("_", "-"): value for name, value in asks.items()}
    for name, value in named.items():
        cluster.workers[name].set(asks_for_addresses=value)
    known = cluster.router.cluster
    await until(
        known.directory,
        lambda: {each.worker_id: each.asks_for_addresses for each in known.ready("prefill")}.items() >= named.items(),
    )


async def test_tickets_have_a_data_address_while_one_prefill_worker_does_not_ask_for_it(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH) as cluster:
        for asks in (True, False, True):
            await _asking(cluster, prefill_1=asks)
            assert (await cluster.complete())[0] == 200
            assert cluster.calls.decode_starts[-1].senders_ask is asks


async def test_a_prefill_worker_that_appears_later_and_does_not_ask_gets_no_such_ticket(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    """It would refuse the request as malformed. Fails if the answer is an error, or if the worker is chosen."""
    async with open_cluster(redis_server, model_dir, TWO_OF_EACH) as cluster:

        async def updated(_: Context) -> None:
            await _asking(cluster, prefill_0=False, prefill_1=False)

        cluster.calls.script.fail("decode_ticket", updated)
        assert (await cluster.complete())[0] == 200
        assert cluster.calls.decode_starts[-1].senders_ask
        assert not cluster.calls.prefills


async def test_without_a_worker_that_knows_them_the_answer_says_so(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, {"decode-0": "decode"}, worker_return_timeout_s=0) as cluster:
        await _made_older(cluster, "decode-0")
        status, body = await cluster.complete(**RULES)
        assert status == 503
        assert "Update the workers" in body["error"]["message"]
        assert (await cluster.stream())[0] == TEXT
