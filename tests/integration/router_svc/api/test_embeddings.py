"""Embeddings over HTTP: shapes, encodings, bounds, and what follows when a worker fails."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pdserve.base.errors import Draining, NoFreeBlocks, Overloaded, PdserveError, RequestError
from pdserve.base.pooling import Pooling, PoolingKind
from pdserve.base.wire import pooling_from_wire
from pdserve.cli.private_redis import PrivateRedis
from router_svc.api.pooling.embedding_request import MAX_ENCODED_NUMBERS
from router_svc.request.admission import Entrant
from router_svc.request.client import Client
from router_svc.request.fair_order import QueueSlot
from tests.integration.router_svc.conftest import ScriptedCluster, open_cluster
from tests.integration.router_svc.request.support import ONE_OF_EACH
from tests.integration.router_svc.script import Fault, failing, hang, vanish
from tests.support.redis import until
from tests.support.tiny_model import NAME, tokens_of, write_model

DIMENSIONS = 16
TEXTS = ["Say hello", "é", "x" * 40]


def expected(token_ids: list[int], kind: str = "last", dimensions: int = DIMENSIONS) -> list[float]:
    """What the scripted workers answer, normalized."""
    kept = {"last": token_ids[-1:], "cls": token_ids[:1], "mean": token_ids}[kind]
    counts = [float(sum(token % dimensions == index for token in kept)) for index in range(dimensions)]
    length = sum(count * count for count in counts) ** 0.5
    # As float32, in which they travel.
    return list(struct.unpack(f"<{dimensions}f", struct.pack(f"<{dimensions}f", *(count / length for count in counts))))


async def embed(cluster: ScriptedCluster, **fields: Any) -> tuple[int, dict[str, Any]]:
    return await cluster.post("/v1/embeddings", {"model": NAME, "input": TEXTS} | fields)


async def test_each_input_has_its_embedding_in_order(cluster: ScriptedCluster) -> None:
    for given in (TEXTS, [tokens_of(text) for text in TEXTS]):
        await check_inputs(cluster, given)
    for one in ("Say hello", tokens_of("Say hello")):
        status, body = await embed(cluster, input=one)
        assert (status, len(body["data"])) == (200, 1)
        assert body["data"][0]["embedding"] == expected(tokens_of("Say hello"))


async def check_inputs(cluster: ScriptedCluster, given: Any) -> None:
    status, body = await embed(cluster, input=given, user="me")
    assert status == 200
    assert [each["embedding"] for each in body["data"]] == [expected(tokens_of(text)) for text in TEXTS]
    assert [(each["object"], each["index"]) for each in body["data"]] == [("embedding", index) for index in range(3)]
    num_tokens = sum(len(tokens_of(text)) for text in TEXTS)
    assert (body["object"], body["model"]) == ("list", NAME)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert not cluster.calls.decode_starts
    assert not any(request.HasField("ticket") for request in prefills(cluster))
    record = (await cluster.get(f"/v1/requests/{body['id']}/trace"))[1]
    assert (record["state"], record["prefilled_by"], record["endpoint"]) == ("finished", "prefill", "/v1/embeddings")
    assert {each["tier"] for each in record["decisions"]} == {"prefill"}


def prefills(cluster: ScriptedCluster) -> list[Any]:
    return [*cluster.calls.prefills]


async def test_workers_get_how_to_pool(cluster: ScriptedCluster) -> None:
    cases: tuple[tuple[dict[str, Any], Pooling], ...] = (
        ({}, Pooling(kind=PoolingKind.LAST, dimensions=DIMENSIONS)),
        ({"dimensions": DIMENSIONS}, Pooling(kind=PoolingKind.LAST, dimensions=DIMENSIONS)),
        ({"dimensions": 5, "pooling": "mean"}, Pooling(kind=PoolingKind.MEAN, dimensions=5)),
        ({"normalize": False, "pooling": "cls"}, Pooling(kind=PoolingKind.CLS, dimensions=16, normalizes=False)),
    )
    for fields, pooling in cases:
        await check_pooling(cluster, fields, pooling)


async def check_pooling(cluster: ScriptedCluster, fields: dict[str, Any], pooling: Pooling) -> None:
    status, body = await embed(cluster, input="Say hello", **fields)
    assert status == 200
    request = prefills(cluster)[-1]
    assert pooling_from_wire(request.pooling) == pooling
    numbers = body["data"][0]["embedding"]
    assert len(numbers) == pooling.dimensions
    if pooling.normalizes:
        assert numbers == expected(tokens_of("Say hello"), pooling.kind, pooling.dimensions)
    else:
        assert numbers == [float(index == ord("S") % DIMENSIONS) for index in range(DIMENSIONS)]


async def test_openais_client_reads_both_encodings(cluster: ScriptedCluster) -> None:
    async with cluster.client() as client:
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = await client.embeddings.create(model=NAME, input=TEXTS, dimensions=7, **options)  # type: ignore[arg-type]
            numbers = [each.embedding for each in answer.data]
            if options == {"encoding_format": "base64"}:
                numbers = [list(struct.unpack("<7f", base64.b64decode(each))) for each in numbers]  # type: ignore[arg-type]
            assert numbers == [expected(tokens_of(text), dimensions=7) for text in TEXTS]
            assert answer.usage.total_tokens == sum(len(tokens_of(text)) for text in TEXTS)


async def test_a_text_is_truncated_where_the_client_wants_that(cluster: ScriptedCluster) -> None:
    assert (await embed(cluster, input="a" * 300))[0] == 400
    for keep, num_tokens in ((3, 3), (-1, 255)):
        for given in ("a" * 300 + "b", tokens_of("a" * 300 + "b")):
            status, body = await embed(cluster, input=given, truncate_prompt_tokens=keep)
            assert (status, body["usage"]["prompt_tokens"]) == (200, num_tokens)
            assert body["data"][0]["embedding"] == expected(tokens_of("b"))


async def test_what_cannot_be_pooled_is_refused_by_name(cluster: ScriptedCluster) -> None:
    for fields, status, param in (
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input"),
        ({"input": ["a", [1]]}, 400, "input"),
        ({"input": ["a"] * 2049}, 400, "input"),
        ({"input": ["a" * 250] * 1201}, 413, "input"),
        ({"input": [258]}, 400, "input"),
        ({"input": [65] * 256}, 400, "input"),
        ({"input": ["a", "a" * 256]}, 400, "input"),
        ({"dimensions": 0}, 400, "dimensions"),
        ({"dimensions": DIMENSIONS + 1}, 400, "dimensions"),
        ({"encoding_format": "int8"}, 400, "encoding_format"),
        ({"pooling": "max"}, 400, "pooling"),
        ({"prompt_name": "query"}, 400, "prompt_name"),
        ({"prompt_name": "query", "input": [65]}, 400, "input"),
        ({"priority": 1}, 400, "priority"),
        ({"stream": True}, 400, "stream"),
        ({"model": "other"}, 404, "model"),
    ):
        answer, body = await embed(cluster, **fields)
        assert (answer, body["error"]["param"]) == (status, param), (fields, body)
    assert not cluster.calls.prefills


async def test_as_many_inputs_as_openais_are_computed_512_at_a_time(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered = cluster.router.models.first.gate, list[int]()
    enter = gate.enter

    def counted(entrants: Sequence[Entrant], client: Client) -> list[QueueSlot]:
        assert (gate.num_waiting, gate.num_admitted) == (0, 0)
        entered.append(len(entrants))
        return enter(entrants, client)

    monkeypatch.setattr(gate, "enter", counted)
    texts = [chr(ord("a") + index % 26) for index in range(2048)]
    status, body = await embed(cluster, input=texts, dimensions=4)
    assert status == 200
    assert entered == [512] * 4
    assert [each["index"] for each in body["data"]] == [*range(2048)]
    assert [each["embedding"] for each in body["data"]] == [expected(tokens_of(each), dimensions=4) for each in texts]
    assert body["usage"]["total_tokens"] == 2048
    await cluster.calls.until(lambda: cluster.calls.num_open == 0)
    assert (gate.num_waiting, gate.num_admitted) == (0, 0)


async def test_inputs_that_find_the_queue_full_later_end_the_request(
    cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, entered = cluster.router.models.first.gate, list[int]()
    enter = gate.enter

    def full(entrants: Sequence[Entrant], client: Client) -> list[QueueSlot]:
        if entered:
            raise Overloaded("The queue is full.", retry_after_s=7)
        entered.append(len(entrants))
        return enter(entrants, client)

    monkeypatch.setattr(gate, "enter", full)
    status, body = await embed(cluster, input=["a"] * 600)
    assert (status, body["error"]["type"], entered) == (429, "rate_limit_error", [512])
    assert (gate.num_waiting, gate.num_admitted) == (0, 0)
    monkeypatch.undo()
    assert (await embed(cluster))[0] == 200


async def test_base64_may_have_twice_as_many_numbers(cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_ENCODED_NUMBERS == 8_388_608
    monkeypatch.setattr("router_svc.api.pooling.embedding_request.MAX_NUMBERS", 2 * DIMENSIONS)
    monkeypatch.setattr("router_svc.api.pooling.embedding_request.MAX_ENCODED_NUMBERS", 4 * DIMENSIONS)
    for encoding, limit in (("float", 2), ("base64", 4)):
        for count, expected_status in ((limit, 200), (limit + 1, 413)):
            assert (await embed(cluster, input=["a"] * count, encoding_format=encoding))[0] == expected_status


async def test_the_files_of_sentence_transformers_decide_unless_the_request_does(
    redis_server: PrivateRedis, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / NAME)
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(
            (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
        )
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    prompts = {"prompts": {"query": "Say ", "document": ""}}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    async with open_cluster(redis_server, directory, ONE_OF_EACH) as cluster:
        for fields, kind, text in (
            ({}, "mean", "hello"),
            ({"pooling": "last"}, "last", "hello"),
            ({"prompt_name": "query"}, "mean", "Say hello"),
            ({"prompt_name": "document"}, "mean", "hello"),
        ):
            _, body = await embed(cluster, input="hello", **fields)
            assert body["data"][0]["embedding"] == expected(tokens_of(text), kind)
            assert body["usage"]["prompt_tokens"] == len(text)


@pytest.mark.parametrize(
    ("point", "fault"),
    [
        ("prefill_pooled", vanish),
        ("prefill_pooled", failing(Draining("it drains"))),
        ("prefill", failing(NoFreeBlocks("full"))),
    ],
    ids=["lost", "drains", "full"],
)
async def test_another_worker_pools_what_one_did_not(cluster: ScriptedCluster, point: str, fault: Fault) -> None:
    cluster.script.fail(point, fault)
    status, body = await embed(cluster, input="Say hello")
    assert status == 200, body
    assert body["data"][0]["embedding"] == expected(tokens_of("Say hello"))
    record = await cluster.only_trace()
    assert len(record["retries"]) == 1
    assert {each["worker"] for each in record["decisions"]} == {"prefill-0", "prefill-1"}


async def test_errors_that_no_worker_would_spare_the_client_end_the_whole_request(cluster: ScriptedCluster) -> None:
    cluster.script.fail("prefill", *[failing(PdserveError("it broke"))] * 2)
    status, body = await embed(cluster, input="Say hello")
    assert (status, "it broke" in json.dumps(body)) == (500, True)
    # The last one: a call for another of its texts may still arrive, and would take a fault of a later request.
    cluster.script.fail("prefill", failing(RequestError("it is wrong", param="prompt")))
    assert (await embed(cluster))[0] == 400
    assert not any(cluster.script.faults.values())


async def test_a_deadline_ends_a_request_that_is_pooled(cluster: ScriptedCluster) -> None:
    """The call to the worker ends with it, which the cluster's own end checks."""
    cluster.script.fail("prefill_pooled", hang)
    status, body = await embed(cluster, input="Say hello", timeout=0.5)
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    assert (await cluster.only_trace())["state"] == "failed"


async def test_without_a_prefill_worker_there_are_no_embeddings(redis_server: PrivateRedis, model_dir: Path) -> None:
    async with open_cluster(redis_server, model_dir, {"decode-0": "decode"}, prefill_expected=0) as cluster:
        status, body = await embed(cluster)
        assert (status, "embeddings" in body["error"]["message"]) == (503, True)
        known = cluster.router.cluster
        await until(known.directory, lambda: len(known.ready("decode")) == 1)
        assert (await cluster.complete())[0] == 200
