"""Embeddings at a real cluster: the same bits alone, in a crowd and behind a cached prefix."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from math import fsum, sqrt
from typing import Any

import numpy as np
import pytest

from tests.support.cluster import MODEL, Cluster

LONG = "A long list of rivers, of their cities and of the bridges that cross them, in no order. " * 12
TEXTS = ["Once upon a time", "대한민국의 수도는", LONG, LONG + "The end", "x"]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_are_the_same_alone_in_a_crowd_and_behind_a_cached_prefix(cluster: Cluster, pooling: str) -> None:
    extra = {"pooling": pooling}

    def embed(texts: list[str]) -> list[list[float]]:
        answer = client.embeddings.create(model=MODEL, input=texts, extra_body=extra)
        return [each.embedding for each in answer.data]

    with cluster.client() as client:
        alone = [embed([text])[0] for text in TEXTS]
        client.completions.create(model=MODEL, prompt=LONG, max_tokens=1)
        assert embed(TEXTS) == alone
        with ThreadPoolExecutor(8) as threads:
            others = [
                threads.submit(client.completions.create, model=MODEL, prompt=text, max_tokens=4) for text in TEXTS
            ]
            crowd = [threads.submit(embed, [text]) for text in reversed(TEXTS)]
            assert [each.result()[0] for each in reversed(crowd)] == alone
            assert all(each.result().choices for each in others)
        for numbers in alone:
            assert len(numbers) == 576
            assert abs(fsum(number * number for number in numbers) - 1) < 1e-6


def test_cut_embeddings_are_heads_and_both_encodings_have_the_same_bits(cluster: Cluster) -> None:
    def numbers(**fields: Any) -> list[float]:
        [only] = client.embeddings.create(model=MODEL, input="Once upon a time", **fields).data
        return only.embedding

    with cluster.client() as client:
        whole = numbers(encoding_format="float")
        encoded: Any = numbers(encoding_format="base64")
        assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == whole == numbers()
        raw, cut = numbers(extra_body={"normalize": False}), numbers(dimensions=64)
        length = sqrt(fsum(number * number for number in raw[:64]))
        assert np.allclose(cut, np.array(raw[:64]) / length, rtol=1e-6)
        assert numbers(dimensions=576) == whole


def test_a_text_is_the_best_document_for_itself_and_ranks_are_scores(cluster: Cluster) -> None:
    documents = ["The sea is cold in winter.", "Bread is made of flour and water.", "def fibonacci(n):"]
    with cluster.client() as client:

        def post(path: str, **fields: Any) -> Any:
            return client.post(path, body={"model": MODEL, "pooling": "mean", **fields}, cast_to=object)

        for query in documents:
            ranked = post("/rerank", query=query, documents=documents)["results"]
            assert ranked[0]["document"]["text"] == query
            assert ranked[0]["relevance_score"] > 0.999999
            scores = post("/score", text_1=query, text_2=documents)["data"]
            assert {each["index"]: each["score"] for each in scores} == {
                each["index"]: each["relevance_score"] for each in ranked
            }
