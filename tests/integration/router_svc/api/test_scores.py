"""Scores of pairs and ranks of documents over HTTP: shapes, order, bounds."""

from __future__ import annotations

from math import sqrt
from typing import Any

from pdserve.base.errors import PdserveError
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.script import failing, vanish
from tests.support.tiny_model import NAME, tokens_of

DOCUMENTS = ["zzzz", "abc", "abcz", "abc", "bb"]


def close(first: str, second: str) -> float:
    """The cosine of what the scripted workers answer for the mean."""
    a, b = ([sum(token % 16 == index for token in tokens_of(text)) for index in range(16)] for text in (first, second))
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / sqrt(sum(x * x for x in a) * sum(y * y for y in b))


async def score(cluster: ScriptedCluster, **fields: Any) -> tuple[int, dict[str, Any]]:
    return await cluster.post("/v1/score", {"model": NAME, "pooling": "mean"} | fields)


async def rerank(cluster: ScriptedCluster, **fields: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": NAME, "pooling": "mean", "query": "abc", "documents": DOCUMENTS}
    return await cluster.post("/v1/rerank", body | fields)


async def test_one_text_is_scored_with_many_and_many_with_as_many(cluster: ScriptedCluster) -> None:
    for first, second in (
        ("abc", DOCUMENTS),
        (["abc"], DOCUMENTS),
        (["abc", "zz", "bcd"], DOCUMENTS[:3]),
        ("abc", "abz"),
    ):
        status, body = await score(cluster, text_1=first, text_2=second)
        firsts, seconds = ([each] if isinstance(each, str) else each for each in (first, second))
        pairs = zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)
        assert status == 200
        assert [each["index"] for each in body["data"]] == [*range(len(seconds))]
        assert {each["object"] for each in body["data"]} == {"score"}
        for found, pair in zip(body["data"], pairs, strict=True):
            assert abs(found["score"] - close(*pair)) < 1e-6
        num_tokens = sum(map(len, [*firsts, *seconds]))
        assert (body["object"], body["model"]) == ("list", NAME)
        assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert (await cluster.get(f"/v1/requests/{body['id']}/trace"))[1]["endpoint"] == "/v1/score"
    assert not cluster.calls.decode_starts


async def test_documents_come_in_the_order_of_their_scores(cluster: ScriptedCluster) -> None:
    order = [1, 3, 2, 4, 0]
    for fields, shown in (
        ({}, 5),
        ({"documents": [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]}, 5),
        ({"top_n": 2, "user": "me"}, 2),
        ({"top_n": 0}, 5),
        ({"top_n": 50, "return_documents": False}, 5),
    ):
        status, body = await rerank(cluster, **fields)
        assert status == 200
        assert [each["index"] for each in body["results"]] == order[:shown]
        for each in body["results"]:
            text = DOCUMENTS[each["index"]]
            assert abs(each["relevance_score"] - close("abc", text)) < 1e-6
            assert each.get("document") == (None if "return_documents" in fields else {"text": text})
        assert body["usage"]["total_tokens"] == 3 + sum(map(len, DOCUMENTS))
        assert -1 <= body["results"][-1]["relevance_score"] <= body["results"][0]["relevance_score"] <= 1


async def test_what_cannot_be_compared_is_refused_by_name(cluster: ScriptedCluster) -> None:
    for fields, status, param in (
        ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, 400, "text_1"),
        ({"text_1": ["a", "b"], "text_2": "c"}, 400, "text_1"),
        ({"text_1": "a", "text_2": []}, 400, "text_2"),
        ({"text_1": "", "text_2": "b"}, 400, "text_1"),
        ({"text_1": "a", "text_2": ["b"] * 512}, 400, "text_2"),
        ({"text_1": "a", "text_2": ["b", "c" * 256]}, 400, "text_2"),
        ({"text_1": "a" * 256, "text_2": "b"}, 400, "text_1"),
        ({"text_1": "a", "text_2": "b", "dimensions": 3}, 400, "dimensions"),
    ):
        answer, body = await score(cluster, **fields)
        assert (answer, body["error"]["param"].partition("[")[0]) == (status, param), (fields, body)
    for fields, status, start in (
        ({"documents": []}, 400, "documents"),
        ({"documents": ["a"] * 512}, 400, "documents"),
        ({"documents": ["a", 3]}, 400, "documents"),
        ({"documents": [{"text": "a", "image": "b"}]}, 400, "documents"),
        ({"query": ""}, 400, "query"),
        ({"top_n": -1}, 400, "top_n"),
    ):
        answer, body = await rerank(cluster, **fields)
        assert (answer, body["error"]["param"].partition(".")[0].partition("[")[0]) == (status, start), (fields, body)
    assert not cluster.calls.prefills


async def test_a_worker_that_is_lost_changes_no_rank_and_an_error_ends_them_all(cluster: ScriptedCluster) -> None:
    _, before = await rerank(cluster)
    cluster.script.fail("prefill_pooled", None, vanish)
    status, body = await rerank(cluster)
    assert (status, body["results"]) == (200, before["results"])
    cluster.script.fail("prefill", *[failing(PdserveError("it broke"))] * 12)
    status, body = await rerank(cluster)
    assert (status, "it broke" in body["error"]["message"]) == (500, True)
    cluster.script.faults.clear()
