"""Log-probabilities of prompts at a real cluster: those that outputs have, however the prompt is computed."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from typing import Any

import pytest

from tests.support.answers import CHAT, COMPLETIONS, Call, send_all
from tests.support.cluster import MODEL, Cluster
from tests.support.lazily import openai

#: Longer than a chunk in which prompts are scored.
PROMPT = "A long list of rivers, of their cities and of the bridges that cross them, in no order. " * 14


def post(cluster: Cluster, path: str, **fields: Any) -> Any:
    """The JSON of an answer."""
    body = json.dumps({"model": MODEL, **fields}).encode()
    request = urllib.request.Request(f"{cluster.base_url}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def test_tokens_of_a_prompt_have_the_log_probabilities_of_the_same_output(cluster: Cluster) -> None:
    """Bit for bit, alternatives included: an output of one request is the prompt of the next."""
    tokens = post(cluster, "/tokenize", prompt=PROMPT)["tokens"]
    options = {"temperature": 0, "logprobs": 4, "logprob_token_ids": [28, 1000], "return_token_ids": True}
    [choice] = post(cluster, COMPLETIONS, prompt=tokens, max_tokens=40, ignore_eos=True, **options)["choices"]
    whole = [*tokens, *choice["token_ids"]]
    [echo] = post(cluster, COMPLETIONS, prompt=whole, echo=True, max_tokens=0, **options)["choices"]
    assert (echo["finish_reason"], echo["token_ids"]) == ("length", [])
    for name in ("token_logprobs", "top_logprobs", "tokens"):
        assert echo["logprobs"][name][len(tokens) :] == choice["logprobs"][name]
        assert len(echo["logprobs"][name]) == len(whole)
    assert echo["logprobs"]["token_logprobs"][0] is echo["logprobs"]["top_logprobs"][0] is None
    text, offsets = echo["text"], echo["logprobs"]["text_offset"]
    for token, offset in zip(echo["logprobs"]["tokens"], offsets, strict=True):
        assert text[offset:].startswith(token)


def test_scores_are_the_same_alone_in_a_crowd_and_behind_a_cached_prefix(cluster: Cluster) -> None:
    bodies = [
        {
            "prompt": PROMPT[: 40 + 170 * index] + str(index),
            "logprobs": index % 3,
            "echo": True,
            "max_tokens": index % 3,
        }
        for index in range(4)
    ]
    calls = [
        Call(path=COMPLETIONS, body={"temperature": 0, **body}, stream=stream)
        for stream in (False, True)
        for body in bodies
    ]
    messages = [{"role": "user", "content": PROMPT}]
    calls.append(
        Call(path=CHAT, body={"messages": messages, "max_tokens": 3, "seed": 4, "prompt_logprobs": 2}, stream=False)
    )
    alone = asyncio.run(send_all(cluster, calls, at_once=1))
    assert asyncio.run(send_all(cluster, calls, at_once=len(calls))) == alone
    assert alone[:4] == alone[4:8]


def _as_lm_eval_reads(cluster: Cluster, max_tokens: int) -> tuple[list[float], list[bool]]:
    """Log-probabilities of two continuations, and whether each is the greedy one."""
    contexts = ["The capital of France is", "Two and two make"]
    wholes = ["The capital of France is Paris.", "Two and two make five."]
    prompts = [post(cluster, "/tokenize", prompt=text)["tokens"] for text in wholes]
    lengths = [len(post(cluster, "/tokenize", prompt=text)["tokens"]) for text in contexts]
    fields = {"temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "echo": True, "seed": 1234}
    answer = post(cluster, COMPLETIONS, prompt=prompts, **fields)
    sums, greedy = [], []
    for choice, length, prompt in zip(answer["choices"], lengths, prompts, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["tokens"]) == len(prompt) + max_tokens
        end = len(prompt)
        own, top = logprobs["token_logprobs"][length:end], logprobs["top_logprobs"][length:end]
        sums.append(sum(own))
        greedy.append(all(one == max(each.values()) for one, each in zip(own, top, strict=True)))
    assert answer["usage"] == {
        "prompt_tokens": sum(map(len, prompts)),
        "completion_tokens": 2 * max_tokens,
        "total_tokens": sum(map(len, prompts)) + 2 * max_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    return sums, greedy


def test_an_lm_eval_request_is_answered_as_it_reads_it(cluster: Cluster) -> None:
    assert _as_lm_eval_reads(cluster, 1) == _as_lm_eval_reads(cluster, 0)


def test_the_model_prefers_what_is_right(eloquent: Cluster) -> None:
    sums, greedy = _as_lm_eval_reads(eloquent, 1)
    assert greedy == [True, False]
    assert sums[0] > sums[1]


def test_openais_client_reads_echoes_with_log_probabilities(cluster: Cluster) -> None:
    with cluster.client() as client:
        options: dict[str, Any] = {
            "model": MODEL,
            "prompt": "Once upon a",
            "echo": True,
            "logprobs": 2,
            "temperature": 0,
        }
        whole = client.completions.create(**options, max_tokens=4).choices[0]
        chunks = [chunk.choices[0] for chunk in client.completions.create(**options, max_tokens=4, stream=True)]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [each for chunk in chunks if chunk.logprobs for each in getattr(chunk.logprobs, name)]
            assert whole.logprobs is not None
            assert streamed == getattr(whole.logprobs, name)
            assert len(streamed) == 7
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model=MODEL, prompt="Once", max_tokens=0)


def test_prompt_logprobs_are_vllms(cluster: Cluster) -> None:
    tokens = post(cluster, "/tokenize", prompt="Once upon a time")["tokens"]
    answer = post(cluster, COMPLETIONS, prompt="Once upon a time", max_tokens=1, temperature=0, prompt_logprobs=3)
    [choice] = answer["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert len(others) == len(tokens) - 1
    for token, entry in zip(tokens[1:], others, strict=True):
        assert [each["rank"] for each in entry.values()][:3] == [1, 2, 3]
        assert len(entry) in (3, 4)
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
