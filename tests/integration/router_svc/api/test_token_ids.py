"""Token ids in answers, prompts that are cut to their last tokens, and what clients learn of the tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import inference_pb2_grpc
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.request.support import TEXT, TOKENS
from tests.support.tiny_model import END, MAX_POSITIONS, NAME, START, VOCAB_SIZE, tokens_of

USER = {"role": "user", "content": "Say hello"}
CHAT_PROMPT = [START, *tokens_of("user:Say hello"), END, START, *tokens_of("assistant:")]


async def test_a_whole_completion_has_the_tokens_of_prompt_and_output(small_cluster: ScriptedCluster) -> None:
    _, body = await small_cluster.complete(prompt=["ab", "cd"], n=2, return_token_ids=True)
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [
        tokens_of(each) for each in ("ab", "ab", "cd", "cd")
    ]
    # The token that ended the output is one of them.
    assert [choice["token_ids"] for choice in body["choices"]] == [TOKENS] * 4
    _, body = await small_cluster.complete()
    assert not {"prompt_token_ids", "token_ids"} & set(body["choices"][0])


async def test_a_streamed_completion_has_an_event_for_each_token(small_cluster: ScriptedCluster) -> None:
    # The stop string is never complete, but its text is held back: the tokens are not.
    _, events = await small_cluster.stream(return_token_ids=True, echo=True, stop=["lo world!"])
    choices = [event["choices"][0] for event in events]
    assert choices[0]["prompt_token_ids"] == tokens_of("Say hello")
    assert choices[0]["text"] == "Say hello"
    assert not any("prompt_token_ids" in choice for choice in choices[1:])
    assert [choice["token_ids"] for choice in choices] == [[], *([token] for token in TOKENS)]
    assert "".join(choice["text"] for choice in choices[1:]) == TEXT


async def test_a_chat_has_the_tokens_of_its_prompt_once_for_all_choices(small_cluster: ScriptedCluster) -> None:
    chat: dict[str, Any] = {"model": NAME, "messages": [USER], "n": 2, "return_token_ids": True}
    _, body = await small_cluster.post("/v1/chat/completions", chat)
    assert body["prompt_token_ids"] == CHAT_PROMPT
    assert [choice["token_ids"] for choice in body["choices"]] == [TOKENS] * 2
    async with small_cluster.http.post(
        f"{small_cluster.base_url}/v1/chat/completions", json=chat | {"stream": True}
    ) as response:
        text = await response.text()
    assert text.count(f'"prompt_token_ids":{CHAT_PROMPT}'.replace(" ", "")) == 1
    assert text.index("prompt_token_ids") < text.index('token_ids":[72]')


async def test_log_probabilities_have_ids_and_ranks(small_cluster: ScriptedCluster) -> None:
    def shown(entries: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(each["token_id"], each["rank"], [top["token_id"] for top in each["top_logprobs"]]) for each in entries]

    expected = [(token, 1, [token, 255]) for token in TOKENS]
    chat: dict[str, Any] = {"model": NAME, "messages": [USER], "logprobs": True, "top_logprobs": 1}
    _, body = await small_cluster.post("/v1/chat/completions", chat)
    assert shown(body["choices"][0]["logprobs"]["content"]) == expected
    _, whole = await small_cluster.complete(logprobs=1, return_token_ids=True)
    assert shown(whole["choices"][0]["logprob_entries"]) == expected
    _, events = await small_cluster.stream(logprobs=1, return_token_ids=True)
    entries = [entry for event in events for entry in event["choices"][0].get("logprob_entries", [])]
    assert entries == whole["choices"][0]["logprob_entries"]
    for fields in ({"logprobs": 1}, {"return_token_ids": True}):
        _, body = await small_cluster.complete(**fields)
        assert "logprob_entries" not in body["choices"][0]


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"prompt": "Say hello", "truncate_prompt_tokens": 5}, "hello"),
        ({"prompt": "Say hello", "truncate_prompt_tokens": 50}, "Say hello"),
        ({"prompt": tokens_of("Say hello"), "truncate_prompt_tokens": 4}, "ello"),
        ({"prompt": ["Say hello", "no"], "truncate_prompt_tokens": 3}, "llo"),
        ({"prompt": "x" * 300 + "y" * 200, "truncate_prompt_tokens": -1}, "x" * 6 + "y" * 200),
        ({"prompt": tokens_of("x" * 300), "truncate_prompt_tokens": -1, "max_tokens": 250}, "x" * 6),
    ],
)
async def test_only_the_last_tokens_of_a_prompt_are_kept(
    small_cluster: ScriptedCluster, fields: dict[str, Any], kept: str
) -> None:
    _, body = await small_cluster.complete(**fields, echo=True, return_token_ids=True)
    assert body["choices"][0]["prompt_token_ids"] == tokens_of(kept)
    assert body["choices"][0]["text"] == kept + TEXT
    assert [*small_cluster.calls.decode_starts[0].prompt_token_ids] == tokens_of(kept)
    assert body["usage"]["prompt_tokens"] == len(kept) + (2 if len(body["choices"]) > 1 else 0)


async def test_a_chat_is_cut_behind_its_template(small_cluster: ScriptedCluster) -> None:
    chat = {"model": NAME, "messages": [{"role": "user", "content": "x" * 300}], "return_token_ids": True}
    _, body = await small_cluster.post("/v1/chat/completions", chat | {"truncate_prompt_tokens": 12})
    assert body["prompt_token_ids"] == CHAT_PROMPT[-12:]
    _, body = await small_cluster.post(
        "/v1/chat/completions", chat | {"truncate_prompt_tokens": -1, "max_completion_tokens": 20}
    )
    assert len(body["prompt_token_ids"]) == MAX_POSITIONS - 20


async def test_over_grpc_the_first_message_has_the_tokens_of_the_prompt(small_cluster: ScriptedCluster) -> None:
    sampling = pb.ClientSampling(max_tokens=50)
    request = pb.GenerateRequest(
        model=NAME, text="Say hello", sampling=sampling, truncate_prompt_tokens=3, return_token_ids=True
    )
    async with small_cluster.channel() as channel:
        messages = [each async for each in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)]
    assert [[*each.prompt_token_ids] for each in messages] == [tokens_of("llo"), *([[]] * (len(messages) - 1))]
    assert messages[-1].usage.prompt_tokens == 3


async def test_what_cannot_be_kept_or_repeated_is_refused(small_cluster: ScriptedCluster) -> None:
    for value, words in ((0, "at least 1"), (-2, "greater than or equal to -1"), (1.5, "valid integer")):
        status, body = await small_cluster.complete(truncate_prompt_tokens=value)
        assert (status, body["error"]["param"]) == (400, "truncate_prompt_tokens")
        assert words in body["error"]["message"]
    # A text far beyond the context is refused before it is tokenized, as ever.
    status, body = await small_cluster.complete(prompt="x" * 200_000, truncate_prompt_tokens=5)
    assert (status, body["error"]["param"]) == (400, "prompt")
    status, body = await small_cluster.complete(suffix="the end")
    assert status == 400
    assert "do not fill the gap" in body["error"]["message"]


async def test_the_tokenizer_is_described(small_cluster: ScriptedCluster) -> None:
    status, body = await small_cluster.get("/tokenizer_info")
    assert status == 200
    assert body["vocab_size"] == VOCAB_SIZE
    assert body["model_max_length"] == MAX_POSITIONS
    assert body["eos_token_ids"] == [END]
    assert "add_generation_prompt" in body["chat_template"]
    assert body["tokenizer_class"]
    assert {"bos_token", "eos_token", "unk_token", "pad_token"} <= set(body)
