"""The OpenAI API, used by the official client against a real cluster."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from tests.support.cluster import MODEL, Cluster
from tests.support.lazily import openai

QUESTION = {"role": "user", "content": "What is the capital of France?"}
#: Long enough that its KV is worth a transfer.
LONG = {"role": "system", "content": "You answer in one short sentence. " * 20}


def _chat(cluster: Cluster, *messages: dict[str, str], **options: Any) -> Any:
    return cluster.client().chat.completions.create(model=MODEL, messages=messages, temperature=0, **options)  # type: ignore[call-overload]


def _complete(cluster: Cluster, prompt: Any, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 8} | options
    return cluster.client().completions.create(model=MODEL, prompt=prompt, **options)


def test_a_streamed_chat_is_answered_with_kv_sent_over_ucx(cluster: Cluster) -> None:
    def moved() -> tuple[float, float]:
        name = "pdserve_kv_transfer_bytes_total"
        return (
            cluster.worker_metric("prefill", name, direction="sent", transport="ucx"),
            cluster.worker_metric("decode", name, direction="received", transport="ucx"),
        )

    before = moved()
    stream = _chat(cluster, LONG, QUESTION, max_tokens=16, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason in ("stop", "length")
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    after = moved()
    assert after[0] > before[0]
    assert after[0] - before[0] == after[1] - before[1]


def test_an_answer_streamed_or_not_is_right_and_ends_by_itself(eloquent: Cluster) -> None:
    whole = _chat(eloquent, LONG, QUESTION)
    chunks = list(_chat(eloquent, LONG, QUESTION, stream=True))
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].message.content == "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.id.startswith("chatcmpl-")
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "stop"


def test_cached_tokens_are_those_that_the_prefill_worker_reused(cluster: Cluster) -> None:
    prompt = "An unusual prompt about marmots and their habits. " * 20
    first = _complete(cluster, prompt).usage
    second = _complete(cluster, prompt).usage
    assert first.prompt_tokens_details.cached_tokens < 16
    assert first.prompt_tokens - 64 <= second.prompt_tokens_details.cached_tokens < first.prompt_tokens


@pytest.mark.parametrize("kind", ["text", "texts", "ids", "id lists"])
def test_every_form_of_prompt_is_accepted(cluster: Cluster, kind: str) -> None:
    text = "Once upon a time"
    ids = _tokenize(cluster, text)
    prompt: Any = {"text": text, "texts": [text, text], "ids": ids, "id lists": [ids, ids]}[kind]
    response = _complete(cluster, prompt)
    assert len({choice.text for choice in response.choices}) == 1
    assert [choice.index for choice in response.choices] == list(range(2 if "s" in kind[-1] and kind != "ids" else 1))
    assert response.usage.completion_tokens == 8 * len(response.choices)


def _tokenize(cluster: Cluster, text: str) -> list[int]:
    answer: Any = cluster.client().post(
        f"{cluster.base_url}/tokenize", body={"model": MODEL, "prompt": text}, cast_to=object
    )
    ids: list[int] = answer["tokens"]
    return ids


def test_detokenize_inverts_tokenize(cluster: Cluster) -> None:
    text = "Das Wetter 오늘 날씨 🙂 fn(x) -> y"
    answer: Any = cluster.client().post(
        f"{cluster.base_url}/detokenize", body={"model": MODEL, "tokens": _tokenize(cluster, text)}, cast_to=object
    )
    assert answer["prompt"] == text


def test_sampled_choices_differ_and_repeat_with_the_same_seed(cluster: Cluster) -> None:
    def sample(seed: int) -> list[str]:
        response = _complete(cluster, "The weather today", n=3, temperature=1.5, seed=seed, max_tokens=12)
        return [choice.text for choice in sorted(response.choices, key=lambda choice: choice.index)]

    assert sample(1) == sample(1)
    assert len({*sample(1), *sample(2)}) == 6


def test_logprobs_of_chat_are_probabilities_in_descending_order(eloquent: Cluster) -> None:
    choice = _chat(eloquent, LONG, QUESTION, logprobs=True, top_logprobs=3).choices[0]
    assert "".join(entry.token for entry in choice.logprobs.content[:-1]) in choice.message.content + "<|im_end|>"
    for entry in choice.logprobs.content:
        top = [alternative.logprob for alternative in entry.top_logprobs]
        assert entry.logprob == pytest.approx(top[0])  # greedy
        assert top == sorted(top, reverse=True)
        assert sum(map(math.exp, top)) <= 1.0001


def test_logprobs_of_completions_have_one_entry_per_token(cluster: Cluster) -> None:
    logprobs = _complete(cluster, "Once upon a time", logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 8


def test_a_stop_string_ends_the_text_before_it_and_the_request_with_it(cluster: Cluster) -> None:
    whole = _complete(cluster, "Count: one, two, three,", max_tokens=24).choices[0].text
    word = whole.split()[2]
    stopped = _complete(cluster, "Count: one, two, three,", max_tokens=24, stop=[word])
    assert stopped.choices[0].text == whole[: whole.index(word)]
    assert stopped.choices[0].finish_reason == "stop"
    streamed = list(_complete(cluster, "Count: one, two, three,", max_tokens=24, stop=[word], stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == stopped.choices[0].text


def test_one_of_several_choices_can_stop_while_the_others_go_on(cluster: Cluster) -> None:
    response = _complete(cluster, "My favourite letter is", n=4, temperature=1.2, seed=5, max_tokens=30, stop=["a"])
    reasons = {choice.finish_reason for choice in response.choices}
    assert all("a" not in choice.text for choice in response.choices)
    assert "stop" in reasons


def test_max_tokens_ends_an_answer_with_length_and_min_tokens_extends_it(cluster: Cluster) -> None:
    response = _complete(cluster, "Once upon a time", max_tokens=3)
    assert (response.choices[0].finish_reason, response.usage.completion_tokens) == ("length", 3)
    kept = _chat(cluster, LONG, QUESTION, max_tokens=30, extra_body={"min_tokens": 20})
    assert kept.usage.completion_tokens >= 20


def test_a_single_token_needs_no_decode_worker(cluster: Cluster) -> None:
    before = cluster.worker_metric("decode", "pdserve_generation_tokens_total")
    assert _complete(cluster, "A prompt of its own for one token. " * 20, max_tokens=1).usage.completion_tokens == 1
    cluster.wait_idle()
    assert cluster.worker_metric("decode", "pdserve_generation_tokens_total") == before


def test_models_are_listed_and_found(cluster: Cluster) -> None:
    assert [model.id for model in cluster.client().models.list()] == [MODEL]
    assert cluster.client().models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        cluster.client().models.retrieve("gpt-17")


async def test_many_concurrent_clients_stream(cluster: Cluster) -> None:
    async with cluster.async_client() as client:

        async def one(number: int) -> str:
            stream = await client.completions.create(
                model=MODEL, prompt=f"Story number {number}: " * 12, max_tokens=12, temperature=0, stream=True
            )
            return "".join([chunk.choices[0].text async for chunk in stream])

        texts = await asyncio.gather(*(one(number) for number in range(24)))
    assert all(texts)
