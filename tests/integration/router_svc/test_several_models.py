"""Several models behind one router: each has its own workers, queue, names and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ollama
import pytest

from pdserve.cli.private_redis import PrivateRedis
from pdserve.peers.workers import Tier
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1.inference_pb2_grpc import InferenceServiceStub
from router_svc.clients.keys import digest_of
from router_svc.routing.cluster import TIERS
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.fake_workers import FakeWorker, fake_worker
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.integration.router_svc.script import CallLog, Script, hang, vanish
from tests.support.own_task import in_own_task
from tests.support.redis import eventually, until
from tests.support.tiny_model import END, NAME, tokens_of

OTHER = "org/large"
OTHER_TEXT = "The other model."
OTHER_OF_EACH: dict[str, Tier] = {"prefill-1": "prefill", "decode-1": "decode"}


@dataclass
class TwoModels:
    """A router with two models, each with one worker of each tier."""

    first: ScriptedCluster
    #: Calls to the workers of the other model, and those workers.
    calls: CallLog
    workers: dict[str, FakeWorker]

    async def knows(self, count: int) -> None:
        """Returns once the router knows this many ready workers of the other model."""
        cluster = self.first.router.models[OTHER].cluster
        await until(cluster.directory, lambda: sum(len(cluster.ready(tier)) for tier in TIERS) == count)


@asynccontextmanager
async def two_models(redis: PrivateRedis, model_dir: Path, **settings: object) -> AsyncIterator[TwoModels]:
    calls = CallLog(Script(replies=[[*tokens_of(OTHER_TEXT), END]]))
    models: dict[str, object] = {
        "model": (str(model_dir), str(model_dir)),
        "served_model_name": (NAME, OTHER),
        "alias": (f"gpt-4o={OTHER}",),
    }
    async with AsyncExitStack() as stack:
        workers = {
            worker_id: await stack.enter_async_context(fake_worker(calls, tier, worker_id, redis.url, OTHER))
            for worker_id, tier in OTHER_OF_EACH.items()
        }
        opened = open_cluster(redis, model_dir, ONE_OF_EACH, **(models | settings))
        two = TwoModels(await stack.enter_async_context(opened), calls, workers)
        await two.knows(len(workers))
        yield two
        await calls.until(lambda: calls.num_open == 0)


@pytest.fixture
async def two(redis_server: PrivateRedis, model_dir: Path) -> AsyncIterator[TwoModels]:
    async with in_own_task(two_models(redis_server, model_dir)) as opened:
        yield opened


async def test_each_model_answers_with_its_own_tokens_over_every_api(two: TwoModels) -> None:
    """Prompts are equal, so that the models differ in nothing but their workers."""
    cases = ((NAME, NAME, "Hello world."), (OTHER, OTHER, OTHER_TEXT), ("gpt-4o", OTHER, OTHER_TEXT))
    for name, answered_as, text in cases:
        status, completion = await two.first.complete(model=name)
        assert (status, completion["model"], completion["choices"][0]["text"]) == (200, answered_as, text)
        chat: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50}
        _, answer = await two.first.post("/v1/chat/completions", chat)
        assert (answer["model"], answer["choices"][0]["message"]["content"]) == (answered_as, text)
        _, message = await two.first.post("/v1/messages", chat)
        assert (message["model"], message["content"][0]["text"]) == (answered_as, text)
        _, response = await two.first.post("/v1/responses", {"model": name, "input": "Hi"})
        assert (response["model"], response["output"][0]["content"][0]["text"]) == (answered_as, text)
        _, line = await two.first.post("/api/chat", chat | {"stream": False})
        assert (line["model"], line["message"]["content"]) == (answered_as, text)
        streamed, events = await two.first.stream(model=name)
        assert (streamed, events[0]["model"]) == (text, answered_as)
        async with two.first.channel() as channel:
            call = InferenceServiceStub(channel).Generate(pb.GenerateRequest(model=name, text="Say hello"))
            assert "".join([choice.text async for message in call for choice in message.choices]) == text
    assert (len(two.first.calls.decode_starts), len(two.calls.decode_starts)) == (7, 14)


async def test_an_unknown_model_is_refused_with_the_names_of_those_there_are(two: TwoModels) -> None:
    status, body = await two.first.complete(model="gpt-17")
    assert status == 404
    assert body["error"]["message"] == (
        f"The model `gpt-17` does not exist. This server has `{NAME}`, `{OTHER}`, `gpt-4o`."
    )
    status, body = await two.first.post("/tokenize", {"prompt": "x"})
    assert (status, body["error"]["param"]) == (400, "model")
    assert body["error"]["message"] == f"`model` is missing. This server has `{NAME}`, `{OTHER}`, `gpt-4o`. Name one."
    assert (await two.first.post("/tokenize", {"prompt": "x", "model": OTHER}))[1]["tokens"] == tokens_of("x")
    assert (await two.first.get("/tokenizer_info"))[0] == 400
    assert (await two.first.get("/tokenizer_info?model=gpt-4o"))[0] == 200


async def test_all_models_and_aliases_are_listed(two: TwoModels) -> None:
    listed = (await two.first.get("/v1/models"))[1]["data"]
    assert [(card["id"], card["root"]) for card in listed] == [(NAME, NAME), (OTHER, OTHER), ("gpt-4o", OTHER)]
    assert (await two.first.get(f"/v1/models/{OTHER}"))[1] == listed[1]
    assert (await two.first.get("/v1/models/gpt-4o"))[1] == listed[2]
    client = ollama.AsyncClient(two.first.base_url)
    try:
        tags, running = (await client.list()).models, (await client.ps()).models
        assert [each.model for each in tags] == [each.model for each in running] == [NAME, OTHER, "gpt-4o"]
        assert tags[0].digest != tags[1].digest == tags[2].digest
        assert (await client.show("gpt-4o:latest")).modelinfo
    finally:
        await client.close()
    _, cluster = await two.first.get("/v1/cluster")
    assert [each["model"] for each in cluster["router"]["models"]] == [NAME, OTHER]
    assert {each["worker_id"]: each["model"] for each in cluster["workers"]} == {
        **dict.fromkeys(ONE_OF_EACH, NAME),
        **dict.fromkeys(OTHER_OF_EACH, OTHER),
    }


async def test_a_model_without_decode_workers_refuses_its_own_requests_only(
    redis_server: PrivateRedis, model_dir: Path
) -> None:
    async with two_models(redis_server, model_dir, worker_return_timeout_s=0.0) as two:
        two.workers["decode-1"].set(ready=False)
        await two.knows(1)

        async def is_reported() -> bool:
            status, health = await two.first.get("/readyz")
            return (status, health["degraded"]) == (200, {"model": f"{OTHER}: no decode worker is ready"})

        await eventually(is_reported)
        assert await two.first.metric("degraded", subject="model") == 1
        status, body = await two.first.complete(model=OTHER)
        assert status == 503
        assert "No decode worker of the model" in body["error"]["message"]
        assert (await two.first.complete())[0] == 200
        two.first.workers["decode-0"].set(ready=False)
        await two.first.knows(1)

        async def is_not_ready() -> bool:
            return (await two.first.get("/readyz"))[0] == 503

        await eventually(is_not_ready)
        two.workers["decode-1"].set(ready=True)
        await two.knows(2)
        assert (await two.first.complete(model=OTHER))[0] == 200


async def test_a_full_queue_of_one_model_does_not_refuse_the_other(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with two_models(redis_server, model_dir, max_num_queued_reqs=0) as two:
        two.calls.script.fail("decode_started", *[hang] * 8)
        running = [asyncio.create_task(two.first.complete(model=OTHER)) for _ in range(8)]
        gate = two.first.router.models[OTHER].gate
        await two.calls.until(lambda: len(two.calls.decode_starts) == 8)
        assert (await two.first.complete(model=OTHER))[0] == 429
        assert (await two.first.complete())[0] == 200
        assert await two.first.metric("num_requests_running", model_name=OTHER) == gate.num_admitted == 8
        assert await two.first.metric("num_requests_running", model_name=NAME) == 0
        assert await two.first.metric("admission_rejections_total", model_name=NAME, reason="queue_full") == 0
        assert await two.first.metric("admission_rejections_total", model_name=OTHER, reason="queue_full") == 1
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def test_a_lost_worker_is_replaced_by_one_of_the_same_model_or_by_none(two: TwoModels) -> None:
    two.calls.script.fail("decode_token", vanish)
    # The worker's next heartbeat shows that it lives, and the request goes on there.
    status, body = await two.first.complete(model=OTHER)
    assert (status, body["choices"][0]["text"]) == (200, OTHER_TEXT)
    assert not two.first.calls.decode_starts
    assert await two.first.metric("request_retries_total", model_name=NAME) == 0
    assert await two.first.metric("request_retries_total", model_name=OTHER) == 1


async def test_a_key_of_one_model_sees_and_uses_that_model_only(redis_server: PrivateRedis, model_dir: Path) -> None:
    path = model_dir.parent / "keys.json"
    keys = [{"id": "large", "sha256": digest_of("secret").hex(), "models": [OTHER]}]
    path.write_text(json.dumps({"keys": keys}), encoding="utf-8")
    async with two_models(redis_server, model_dir, api_keys_file=str(path)) as two:
        headers = {"Authorization": "Bearer secret"}
        async with two.first.http.get(f"{two.first.base_url}/v1/models", headers=headers) as response:
            assert [card["id"] for card in (await response.json())["data"]] == [OTHER, "gpt-4o"]
        body = {"prompt": "x", "max_tokens": 50}
        status, _ = await two.first.post("/v1/completions", body | {"model": OTHER}, headers=headers)
        assert status == 200
        status, answer = await two.first.post("/v1/completions", body | {"model": NAME}, headers=headers)
        assert (status, answer["error"]["message"]) == (403, f"The API key large may not use the model `{NAME}`.")
        _, answer = await two.first.post("/v1/completions", body | {"model": "gpt-17"}, headers=headers)
        assert answer["error"]["message"].endswith(f"This server has `{OTHER}`, `gpt-4o`.")
