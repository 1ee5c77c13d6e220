"""The content of responses, seen through OpenAI's client where it parses them."""

from __future__ import annotations

from typing import Any

from pdserve.base.ids import WorkerId
from pdserve.base.sampling import MAX_LOGPROBS
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.request.support import after_first_token
from tests.support.tiny_model import END, MAX_POSITIONS, NAME, START, tokens_of

USER: Any = {"role": "user", "content": "Say hello"}


async def test_several_prompts_and_choices_are_numbered_by_prompt_then_choice(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [tokens_of("first"), tokens_of("second")]
    async with cluster.client() as client:
        completion = await client.completions.create(model=NAME, prompt=["a", "bb", "ccc"], n=2, max_tokens=50)
    assert [choice.index for choice in completion.choices] == list(range(6))
    assert [choice.text for choice in completion.choices] == ["first", "second"] * 3
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == 6
    assert completion.usage.completion_tokens == 33
    # Workers see one request per prompt. The first one has the response's id.
    ids = {start.ref.request_id for start in cluster.calls.decode_starts}
    assert ids == {completion.id, f"{completion.id}:1", f"{completion.id}:2"}


async def test_prompts_may_be_token_ids(cluster: ScriptedCluster) -> None:
    for prompt, lengths in (([1, 2, 3], [3]), ([[1, 2], [3]], [2, 1])):
        cluster.calls.decode_starts.clear()
        status, _ = await cluster.complete(prompt=prompt)
        assert status == 200
        assert sorted(len(start.prompt_token_ids) for start in cluster.calls.decode_starts) == sorted(lengths)


async def test_the_prefill_workers_cache_hit_appears_in_the_usage(cluster: ScriptedCluster) -> None:
    cluster.script.cached_tokens = 7
    async with cluster.client() as client:
        completion = await client.completions.create(model=NAME, prompt="Say hello")
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens == 7


async def test_echo_starts_with_the_prompt(cluster: ScriptedCluster) -> None:
    _, body = await cluster.complete(prompt="Say: ", echo=True)
    assert body["choices"][0]["text"] == "Say: Hello world."
    text, _ = await cluster.stream(prompt=tokens_of("Say: "), echo=True)
    assert text == "Say: Hello world."


async def test_an_echo_whose_prompt_ends_within_a_character_goes_on_with_it(cluster: ScriptedCluster) -> None:
    """Two texts that are decoded apart have a U+FFFD on each side of the border."""
    data = "Hot 🌶 é".encode()
    for border in range(1, len(data)):
        prompt, cluster.script.replies = [*data[:border]], [[*data[border:], END]]
        for n in (1, 2):
            _, whole = await cluster.complete(prompt=[prompt, prompt], echo=True, n=n)
            assert [choice["text"] for choice in whole["choices"]] == [data.decode()] * 2 * n
        text, _ = await cluster.stream(prompt=prompt, echo=True)
        assert text == data.decode()
        # Without the prompt, its part of the character is missing.
        _, alone = await cluster.complete(prompt=prompt)
        assert alone["choices"][0]["text"] == data[border:].decode(errors="replace")
        _, none = await cluster.complete(prompt=prompt, echo=True, max_tokens=0)
        assert none["choices"][0]["text"] == data[:border].decode(errors="replace")


async def test_offsets_are_those_of_the_text_behind_a_character_of_several_tokens(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [[*"aé🌶b".encode(), END]]
    _, whole = await cluster.complete(logprobs=0)
    _, events = await cluster.stream(logprobs=0)
    expected = [0, 1, 1, 2, 2, 2, 2, 3, 4]
    assert whole["choices"][0]["logprobs"]["text_offset"] == expected
    choices = [choice for event in events for choice in event["choices"]]
    assert [each for choice in choices for each in (choice["logprobs"] or {}).get("text_offset", ())] == expected


async def test_stop_strings_never_appear_incompletely(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [tokens_of("Hello wonderful world")]
    text, events = await cluster.stream(stop=["wor", "wonderfully"])
    assert text == "Hello wonderful "
    shown = ""
    for event in events:
        shown += event["choices"][0]["text"]
        assert "Hello wonderful ".startswith(shown)
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert events[-1]["choices"][0]["stop_reason"] == "wor"


async def test_stop_strings_appear_on_request(cluster: ScriptedCluster) -> None:
    _, body = await cluster.complete(stop="wor", include_stop_str_in_output=True)
    assert body["choices"][0]["text"] == "Hello wor"


async def test_special_tokens_appear_on_request(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [[START, *tokens_of("hi")]]
    _, body = await cluster.complete()
    assert body["choices"][0]["text"] == "hi"
    _, body = await cluster.complete(skip_special_tokens=False)
    assert body["choices"][0]["text"] == "<|start|>hi"


async def test_length_is_the_finish_reason_at_max_tokens(cluster: ScriptedCluster) -> None:
    async with cluster.client() as client:
        completion = await client.completions.create(model=NAME, prompt="x", max_tokens=5)
        assert (completion.choices[0].text, completion.choices[0].finish_reason) == ("Hello", "length")


async def test_completions_default_to_16_tokens_and_chats_to_the_rest_of_the_context(cluster: ScriptedCluster) -> None:
    await cluster.post("/v1/completions", {"model": NAME, "prompt": "x"})
    await cluster.post("/v1/chat/completions", {"model": NAME, "messages": [USER]})
    completion, chat = cluster.calls.decode_starts
    assert completion.sampling.max_tokens == 16
    assert chat.sampling.max_tokens == MAX_POSITIONS - len(chat.prompt_token_ids)


async def test_the_default_of_16_tokens_is_limited_by_the_context(cluster: ScriptedCluster) -> None:
    status, _ = await cluster.post("/v1/completions", {"model": NAME, "prompt": "x" * (MAX_POSITIONS - 3)})
    assert status == 200
    assert cluster.calls.decode_starts[0].sampling.max_tokens == 3


async def test_sampling_parameters_reach_the_workers_unchanged(cluster: ScriptedCluster) -> None:
    requested = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.25,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"65": 2, "66": -1.5},
        "stop_token_ids": [10],
        "ignore_eos": True,
        "min_tokens": 3,
        "max_tokens": 20,
        "seed": -5,
        "n": 2,
        "logprobs": MAX_LOGPROBS,
    }
    await cluster.complete(**requested)
    sampling = cluster.calls.decode_starts[0].sampling
    assert sampling == cluster.calls.prefills[0].sampling
    assert sampling.top_k == 0
    assert dict(sampling.logit_bias) == {65: 2.0, 66: -1.5}
    assert list(sampling.stop_token_ids) == [10]
    for name in set(requested) - {"top_k", "logit_bias", "stop_token_ids"}:
        assert getattr(sampling, name) == requested[name], name


async def test_requests_without_a_seed_get_a_random_one(cluster: ScriptedCluster) -> None:
    await cluster.complete()
    await cluster.complete()
    first, second = cluster.calls.decode_starts
    assert first.sampling.seed != second.sampling.seed


async def test_chat_templates_get_roles_contents_and_variables(cluster: ScriptedCluster) -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": None},
        USER,
    ]
    body = {"model": NAME, "messages": messages, "chat_template_kwargs": {"mood": "!"}}
    status, answer = await cluster.post("/v1/chat/completions", body)
    assert status == 200, answer
    prompt = "system:a\nb", "assistant:", "user:Say hello"
    expected = [token for text in prompt for token in (START, *tokens_of(text), END)]
    expected += [START, *tokens_of("assistant:!")]
    assert list(cluster.calls.decode_starts[0].prompt_token_ids) == expected


async def test_chat_logprobs_have_tokens_bytes_and_alternatives(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [[*"é".encode(), END]]
    async with cluster.client() as client:
        chat = await client.chat.completions.create(model=NAME, messages=[USER], logprobs=True, top_logprobs=2)
    assert chat.choices[0].message.content == "é"
    assert chat.choices[0].logprobs is not None
    content = chat.choices[0].logprobs.content
    assert content is not None
    assert [entry.bytes for entry in content] == [[0xC3], [0xA9], list(b"<|end|>")]
    assert content[0].token == "�"
    assert content[0].logprob == -0.5
    assert [top.logprob for top in content[0].top_logprobs] == [-0.5, -9999.0]


async def test_completion_logprobs_have_tokens_offsets_and_alternatives(cluster: ScriptedCluster) -> None:
    cluster.script.replies = [tokens_of("abc")]
    async with cluster.client() as client:
        whole = await client.completions.create(model=NAME, prompt="x", logprobs=2)
        stream = await client.completions.create(model=NAME, prompt="x", logprobs=2, stream=True)
        chunks = [chunk.choices[0].logprobs async for chunk in stream]
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5] * 3
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs == [{text: -0.5, "�": -9999.0} for text in "abc"]
    assert [offset for chunk in chunks if chunk for offset in chunk.text_offset or []] == [0, 1, 2]


async def test_response_ids_are_random_or_the_clients_own(cluster: ScriptedCluster) -> None:
    async def ids(path: str, body: dict[str, Any], **headers: str) -> tuple[str, str]:
        async with cluster.http.post(cluster.base_url + path, json={"model": NAME} | body, headers=headers) as response:
            answer = await response.json()
            return answer["id"], response.headers["X-Request-Id"]

    identity, header = await ids("/v1/completions", {"prompt": "x"})
    assert identity == f"cmpl-{header}"
    identity, header = await ids("/v1/chat/completions", {"messages": [USER]}, **{"X-Request-Id": "my-own.1"})
    assert (identity, header) == ("chatcmpl-my-own.1", "my-own.1")
    _, header = await ids("/v1/completions", {"prompt": "x"}, **{"X-Request-Id": "no spaces; or such"})
    assert len(header) == 32


async def test_workers_get_unique_ids_for_repeated_request_ids(cluster: ScriptedCluster) -> None:
    headers = {"X-Request-Id": "again"}
    for _ in range(2):
        async with cluster.http.post(
            f"{cluster.base_url}/v1/completions", json={"model": NAME, "prompt": "x"}, headers=headers
        ) as response:
            assert (await response.json())["id"] == "cmpl-again"
    first, second = (start.ref.request_id for start in cluster.calls.decode_starts)
    assert first != second
    assert (await cluster.trace("again"))["request_id"] == "cmpl-again"


async def test_errors_have_the_request_id_header(cluster: ScriptedCluster) -> None:
    headers = {"X-Request-Id": "mine"}
    # A first token that came between the two would be progress, and a third worker would get the request.
    cluster.script.fail("decode_token", None, after_first_token(cluster, _broken, request_id="mine"), _broken)
    async with cluster.http.post(
        f"{cluster.base_url}/v1/completions", json={"model": NAME, "prompt": "x"}, headers=headers
    ) as response:
        assert response.status >= 500
        assert response.headers["X-Request-Id"] == "mine"


async def _broken(_: object) -> None:
    raise RuntimeError("a bug in a worker")


async def test_models_are_listed_with_the_context_of_the_workers(cluster: ScriptedCluster) -> None:
    async with cluster.client() as client:
        models = [model async for model in client.models.list()]
        model = await client.models.retrieve(NAME)
    assert [listed.id for listed in models] == [NAME]
    assert model.model_dump()["max_model_len"] == MAX_POSITIONS
    status, body = await cluster.get("/v1/models/other")
    assert (status, body["error"]["param"]) == (404, "model")


async def test_tokenize_and_detokenize(cluster: ScriptedCluster) -> None:
    _, body = await cluster.post("/tokenize", {"prompt": "hé", "return_token_strs": True})
    assert body["tokens"] == [*"hé".encode()]
    assert (body["count"], body["max_model_len"]) == (3, MAX_POSITIONS)
    assert body["token_strs"] == ["h", "�", "�"]
    _, body = await cluster.post("/tokenize", {"messages": [USER], "add_generation_prompt": False})
    assert body["count"] == len("user:Say hello") + 2
    _, body = await cluster.post("/detokenize", {"tokens": [*"hé".encode(), END]})
    assert body["prompt"] == "hé<|end|>"
    status, body = await cluster.post("/detokenize", {"tokens": [999]})
    assert (status, body["error"]["param"]) == (400, "tokens")
    status, body = await cluster.post("/tokenize", {})
    assert (status, body["error"]["param"]) == (400, "prompt")


async def test_a_cached_prefix_attracts_a_request_to_its_worker(cluster: ScriptedCluster) -> None:
    index = {WorkerId("decode-1"): 2, WorkerId("prefill-1"): 1}
    object.__setattr__(cluster.router.cluster, "index", lambda hashes: index if len(hashes) == 2 else {})
    _, body = await cluster.complete(prompt="x" * 40)
    record = await cluster.trace(body["id"])
    assert [decision["worker"] for decision in record["decisions"]] == ["decode-1", "prefill-1"]
    assert record["decisions"][0]["why"].startswith("32 of 40 tokens cached")


async def test_the_cluster_is_described_for_pdserve_status(cluster: ScriptedCluster) -> None:
    _, body = await cluster.get("/v1/cluster")
    assert body["router"]["status"] == "ready"
    assert body["router"]["model"] == NAME
    assert body["redis"] == {"available": True}
    assert [worker["worker_id"] for worker in body["workers"]] == ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    _, version = await cluster.get("/version")
    assert version["version"] == body["router"]["version"]


async def test_usage_comes_with_every_chunk_on_request(cluster: ScriptedCluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, events = await cluster.stream(stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == 13
    assert events[-1]["choices"] == []
