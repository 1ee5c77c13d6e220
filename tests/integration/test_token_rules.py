"""Allowed and forbidden tokens at a real cluster: equal everywhere, and refused where they cannot be tokens."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import grpc
import pytest

from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from tests.support.answers import COMPLETIONS, Call, differences, send_all
from tests.support.cluster import MODEL, Cluster
from tests.support.depth import IS_FULL
from tests.support.lazily import openai

VOCAB_SIZE = 49_152
#: Long enough that its KV is worth a transfer.
PROMPT = "A long list of rivers, of their cities and of the bridges that cross them, in no order. " * 20
ALLOWED = list(range(300, 6000, 3))


def _tokens(cluster: Cluster, **fields: Any) -> list[list[int]]:
    """The tokens of each choice, over gRPC, which has the same rules."""
    n = fields.get("n", 1)
    sampling = pb.ClientSampling(**({"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | fields))
    tokens: list[list[int]] = [[] for _ in range(n)]
    with grpc.insecure_channel(cluster.grpc_address) as channel:
        request = pb.GenerateRequest(model=MODEL, text=PROMPT, sampling=sampling)
        for response in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60):
            for choice in response.choices:
                tokens[choice.choice_index] += choice.token_ids
    return tokens


def _token_ids(cluster: Cluster, text: str) -> list[int]:
    body = json.dumps({"prompt": text, "add_special_tokens": False}).encode()
    request = urllib.request.Request(f"{cluster.base_url}/tokenize", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        tokens: list[int] = json.loads(response.read())["tokens"]
        return tokens


def test_all_tokens_are_allowed_ones_and_the_first_one_too(cluster: Cluster) -> None:
    for options in ({}, {"temperature": 1.0, "seed": 3, "n": 4}):
        for tokens in _tokens(cluster, allowed_token_ids=ALLOWED, **options):
            assert len(tokens) == 24
            assert set(tokens) <= set(ALLOWED)
            assert len(set(tokens)) > 1


@pytest.mark.skipif(not IS_FULL, reason="one of many cases: `make test-all ARGS=full-depth` runs it")
def test_no_bad_word_occurs_though_its_tokens_do(cluster: Cluster) -> None:
    [free] = _tokens(cluster, max_tokens=40)
    client = cluster.client()
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**options, extra_body={"ignore_eos": True}).choices[0].text
    words = [word for word in dict.fromkeys(text.split()) if word.isalpha() and len(word) > 3][:3]
    assert words, text
    for word in words:
        answer = client.completions.create(**options, extra_body={"ignore_eos": True, "bad_words": [word]})
        assert f" {word}" not in answer.choices[0].text
    [other] = _tokens(cluster, max_tokens=40, bad_words=words)
    assert other != free


def test_answers_are_those_of_a_single_worker_alone_and_in_a_crowd(cluster: Cluster, monolith: Cluster) -> None:
    body = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "allowed_token_ids": ALLOWED}
    calls = [
        Call(path=COMPLETIONS, body={**body, **more}, stream=stream)
        for stream in (False, True)
        for more in (
            {"temperature": 0, "bad_words": ["the", "of a"]},
            {"temperature": 0.9, "seed": 4, "n": 3, "bad_words": ["a", "in the", "to"]},
            {"temperature": 1.1, "seed": 5, "structured_outputs": {"regex": "([a-z]+ ){3,9}"}, "logprobs": 2},
            {"temperature": 0.7, "seed": 6, "logprobs": 3, "logprob_token_ids": [28, 30, 1000]},
        )
    ]
    expected = asyncio.run(send_all(monolith, calls, at_once=1))
    answers = asyncio.run(send_all(cluster, calls, at_once=len(calls)))
    assert not differences(calls, answers, expected)
    assert expected[:4] == expected[4:]


@pytest.mark.parametrize("field", ["allowed_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE, 2**31, 2**63])
def test_an_id_outside_of_the_vocabulary_is_refused_and_its_neighbours_go_on(
    cluster: Cluster, field: str, wrong: int
) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
    client = cluster.client()
    expected = client.completions.create(**options).choices[0].text
    stream = client.completions.create(**options, stream=True)
    text = next(iter(stream)).choices[0].text
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**options, extra_body={field: [1, wrong]})
    assert (refused.value.param or "").startswith(field)
    assert text + "".join(chunk.choices[0].text for chunk in stream) == expected


def test_log_probabilities_of_listed_tokens_are_those_of_the_likeliest(cluster: Cluster) -> None:
    """A token has one log-probability at a position, whether it is asked for by its rank or by its id."""
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0}
    chat: dict[str, Any] = {**options, "messages": [{"role": "user", "content": PROMPT}], "logprobs": True}
    client = cluster.client()

    def alternatives(**fields: Any) -> list[dict[str, float]]:
        answer = client.chat.completions.create(**chat, **fields)
        content = answer.choices[0].logprobs
        assert content is not None
        return [{each.token: each.logprob for each in token.top_logprobs} for token in content.content or ()]

    likeliest = alternatives(top_logprobs=20)
    texts = [*likeliest[0]][3:9:2]
    ids = [_token_ids(cluster, text) for text in texts]
    assert all(len(each) == 1 for each in ids), ids
    found = alternatives(top_logprobs=1, extra_body={"logprob_token_ids": [token for [token] in ids]})
    assert [*found[0]] == [next(iter(likeliest[0])), *texts]
    for some, all_of_them in zip(found, likeliest, strict=True):
        assert len(some) >= len(texts)
        assert {text: some[text] for text in some if text in all_of_them} == {
            text: all_of_them[text] for text in some if text in all_of_them
        }
    unlikely = _token_ids(cluster, "7")
    body = {**options, "prompt": PROMPT, "logprobs": 0, "max_tokens": 1, "extra_body": {"logprob_token_ids": unlikely}}
    logprobs = client.completions.create(**body).choices[0].logprobs
    assert logprobs is not None
    assert len((logprobs.top_logprobs or [{}])[0]) == 2


def test_an_output_that_no_token_may_follow_ends_with_an_error_of_its_own(cluster: Cluster) -> None:
    """Each digit is a token. The second one would complete the bad word, and no other is allowed."""
    [seven] = _token_ids(cluster, "7")
    rules = {"allowed_token_ids": [seven], "bad_words": ["77"], "ignore_eos": True}
    options: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
    client = cluster.client()
    with pytest.raises(openai.InternalServerError, match="allowed_token_ids"):
        client.completions.create(**options, extra_body=rules)
    assert client.completions.create(**options, extra_body={**rules, "bad_words": []}).choices[0].text == "7777"
