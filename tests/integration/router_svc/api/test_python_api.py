"""`LLM` and `AsyncLLM` against a real router with scripted workers: fields, order, failures, overload, aborts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve import (
    LLM,
    AsyncLLM,
    PoolingParams,
    PromptRefused,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    ShutDown,
)
from pdserve.base.errors import Cancelled, NotFound, PeerLost
from pdserve.base.wire import pooling_from_wire
from pdserve.cli.free_ports import free_port
from pdserve.llm.client import derived_seed
from tests.integration.router_svc.conftest import ScriptedCluster
from tests.integration.router_svc.request.support import TEXT, TOKENS
from tests.support.tiny_model import END, MAX_POSITIONS, NAME, START, tokens_of

USER = {"role": "user", "content": "Say hello"}
LONG = SamplingParams(max_tokens=50)
DELTA = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.DELTA)


async def _blocking(work: Any, *arguments: Any, **options: Any) -> Any:
    """`LLM` blocks, and the router runs on this event loop."""
    return await asyncio.to_thread(work, *arguments, **options)


@pytest.fixture
async def llm(small_cluster: ScriptedCluster) -> AsyncIterator[LLM]:
    opened = await _blocking(LLM, base_url=small_cluster.base_url)
    yield opened
    await _blocking(opened.shutdown)


@pytest.fixture
async def async_llm(small_cluster: ScriptedCluster) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(NAME, base_url=small_cluster.base_url) as opened:
        yield opened


async def test_results_have_vllms_fields_in_the_order_of_the_prompts(small_cluster: ScriptedCluster, llm: LLM) -> None:
    prompts = ["ab", tokens_of("cd"), {"prompt": "ef", "cache_salt": "s"}]
    params = [LONG, SamplingParams(max_tokens=3, logprobs=1, n=2), SamplingParams(max_tokens=50, seed=5)]
    first, second, third = await _blocking(llm.generate, prompts, params, use_tqdm=False)
    assert (first.prompt, first.prompt_token_ids, first.finished) == ("ab", tokens_of("ab"), True)
    assert (first.outputs[0].text, first.outputs[0].token_ids) == (TEXT, TOKENS)
    assert (first.outputs[0].finish_reason, first.outputs[0].logprobs) == ("stop", None)
    assert (second.prompt, second.prompt_token_ids) == (None, tokens_of("cd"))
    assert [(each.index, each.text, each.finish_reason) for each in second.outputs] == [
        (0, "Hel", "length"),
        (1, "Hel", "length"),
    ]
    logprobs = second.outputs[0].logprobs
    assert [list(each) for each in logprobs] == [[token, 255] for token in tokens_of("Hel")]
    assert (logprobs[0][72].logprob, logprobs[0][72].rank, logprobs[0][72].decoded_token) == (-0.5, 1, "H")
    assert second.outputs[0].cumulative_logprob == -1.5
    assert third.seed == 5
    starts = {bytes(start.prompt_token_ids): start.sampling for start in small_cluster.calls.decode_starts}
    assert [starts[prompt].seed for prompt in (b"ab", b"cd", b"ef")] == [first.seed, second.seed, 5]
    assert first.seed != second.seed
    status, record = await small_cluster.get(f"/v1/requests/{first.request_id}/trace")
    assert (status, record["endpoint"]) == (200, "/v1/completions")


async def test_a_repeated_script_has_the_same_seeds(small_cluster: ScriptedCluster) -> None:
    def script(**options: Any) -> list[int | None]:
        with LLM(base_url=small_cluster.base_url, **options) as llm:
            return [each.seed for each in llm.generate(["a", "b"], LONG, use_tqdm=False)]

    once = await _blocking(script)
    assert await _blocking(script) == once
    assert await _blocking(script, seed=1) != once
    assert await _blocking(script, seed=None) == [None, None]


async def test_chats_are_rendered_by_the_server(small_cluster: ScriptedCluster, llm: LLM) -> None:
    one, two = await _blocking(llm.chat, [[USER], [USER]], SamplingParams(max_tokens=50, logprobs=0), use_tqdm=False)
    assert one.prompt_token_ids == [START, *tokens_of("user:Say hello"), END, START, *tokens_of("assistant:")]
    assert (one.outputs[0].text, one.outputs[0].token_ids, one.outputs[0].tool_calls) == (TEXT, TOKENS, [])
    assert [next(iter(each)) for each in one.outputs[0].logprobs] == TOKENS
    assert two.outputs[0].text == TEXT
    options = {"add_generation_prompt": False, "chat_template_kwargs": {"mood": "!"}}
    [bare] = await _blocking(llm.chat, [USER], LONG, use_tqdm=False, **options)
    assert bare.prompt_token_ids == [START, *tokens_of("user:Say hello"), END, *tokens_of("!")]


async def test_options_of_chats_are_fields_of_the_http_api(thinker: ScriptedCluster) -> None:
    """Fails if an option is lost on its way, since a lost one changes the prompt, the grammar or the budget."""
    call = '<tool_call>\n{"name": "put", "arguments": {}}\n</tool_call>'
    thinker.script.replies = [[*tokens_of(call), END]]
    tools = [
        {"type": "function", "function": {"name": "put", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    ]
    options: dict[str, Any] = {"tools": tools, "tool_choice": "required", "reasoning_effort": "low"}
    params = SamplingParams(max_tokens=99, seed=3, thinking_token_budget=4)

    def chat(**more: Any) -> list[RequestOutput]:
        with LLM(base_url=thinker.base_url) as llm:
            return llm.chat([USER], params, use_tqdm=False, **options | more)

    [called] = await _blocking(chat, parallel_tool_calls=False)
    assert [each["function"]["name"] for each in called.outputs[0].tool_calls] == ["put"]
    sent = thinker.calls.decode_starts[-1]
    body = {"model": NAME, "messages": [USER], "max_tokens": 99, "seed": 3, "temperature": 1.0, **options}
    more = {"parallel_tool_calls": False, "thinking_token_budget": 4}
    assert (await thinker.post("/v1/chat/completions", body | more))[0] == 200
    same = thinker.calls.decode_starts[-1]
    assert (same.sampling, same.prompt_token_ids) == (sent.sampling, sent.prompt_token_ids)
    for wrong, text in (
        ({"documents": [{"text": "x"}]}, "shows no documents"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template": "{{ 1 }}"}, "--trust-request-chat-template"),
    ):
        with pytest.raises(PromptRefused, match=text):
            await _blocking(chat, **wrong)


async def test_without_a_limit_an_output_takes_the_rest_of_the_context(
    small_cluster: ScriptedCluster, llm: LLM
) -> None:
    params = SamplingParams(max_tokens=None)
    [text, tokens] = await _blocking(llm.generate, ["abc", [65] * 9], params, use_tqdm=False)
    assert (text.prompt, text.prompt_token_ids) == ("abc", tokens_of("abc"))
    starts = {len(start.prompt_token_ids): start.sampling.max_tokens for start in small_cluster.calls.decode_starts}
    assert starts == {3: MAX_POSITIONS - 3, 9: MAX_POSITIONS - 9}
    assert tokens.outputs[0].text == TEXT


async def test_the_tokenizer_is_the_servers(llm: LLM, async_llm: AsyncLLM) -> None:
    tokenizer = await _blocking(llm.get_tokenizer)
    assert await _blocking(tokenizer.encode, "ab") == tokens_of("ab")
    assert await _blocking(tokenizer.decode, [*tokens_of("ab"), END]) == "ab<|end|>"
    chat = [START, *tokens_of("user:Say hello"), END, START, *tokens_of("assistant:")]
    assert await _blocking(tokenizer.apply_chat_template, [USER]) == chat
    assert tokenizer.eos_token_ids == [END]
    assert await (await async_llm.get_tokenizer()).encode("ab") == tokens_of("ab")


async def test_a_refused_prompt_is_named_and_the_others_are_cancelled(small_cluster: ScriptedCluster, llm: LLM) -> None:
    small_cluster.script.pace = asyncio.Semaphore(0)
    with pytest.raises(PromptRefused, match=r"Prompt 2 of 3: The prompt has 300 tokens.*the context holds") as refused:
        await _blocking(llm.generate, ["a", "b", "x" * 300], LONG, use_tqdm=False)
    assert (refused.value.index, refused.value.param) == (2, "prompt")
    assert isinstance(refused.value, ValueError)
    await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)
    small_cluster.script.pace = None
    [output] = await _blocking(llm.generate, "a", LONG, use_tqdm=False)
    assert output.outputs[0].text == TEXT


async def test_who_does_not_answer_or_serves_another_model_is_an_error(small_cluster: ScriptedCluster) -> None:
    with pytest.raises(NotFound, match="serves 'tiny', not 'other'"):
        await _blocking(LLM, "other", base_url=small_cluster.base_url)
    with pytest.raises(PeerLost, match=r"Cannot reach http://127\.0\.0\.1:.*base_url"):
        await _blocking(LLM, base_url=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ValueError, match=r"'max_model_len' is an option of a cluster that is started here"):
        LLM(base_url=small_cluster.base_url, max_model_len=5)
    with pytest.raises(ValueError, match="Name a `model`"):
        LLM()


async def test_outputs_grow_or_have_what_is_new(async_llm: AsyncLLM) -> None:
    grown = [output async for output in async_llm.generate("ab", LONG, "mine")]
    assert [output.outputs[0].text for output in grown][:3] == ["H", "He", "Hel"]
    assert [output.finished for output in grown] == [False] * (len(grown) - 1) + [True]
    assert {output.request_id for output in grown} == {"mine"}
    assert (grown[-1].outputs[0].token_ids, grown[-1].prompt_token_ids) == (TOKENS, tokens_of("ab"))
    new = [output async for output in async_llm.generate("ab", DELTA)]
    assert "".join(each.text for output in new for each in output.outputs) == TEXT
    assert [token for output in new for each in output.outputs for token in each.token_ids] == TOKENS
    final = SamplingParams(max_tokens=50, output_kind=RequestOutputKind.FINAL_ONLY)
    assert [output.outputs[0].text async for output in async_llm.generate("ab", final)] == [TEXT]
    chat = [output async for output in async_llm.chat([USER], SamplingParams(max_tokens=50, logprobs=1))]
    assert (chat[-1].outputs[0].text, chat[-1].finished) == (TEXT, True)
    assert [list(each) for each in chat[-1].outputs[0].logprobs or ()] == [[token, 255] for token in TOKENS]


@pytest.mark.parametrize("tokens", [0, 3])
async def test_an_aborted_request_ends_with_what_it_has(
    small_cluster: ScriptedCluster, async_llm: AsyncLLM, tokens: int
) -> None:
    small_cluster.script.pace = asyncio.Semaphore(max(0, tokens - 1))
    if not tokens:
        small_cluster.script.fail("prefill", lambda _: asyncio.Event().wait())  # type: ignore[arg-type, return-value]
    outputs: list[RequestOutput] = []

    async def collect() -> None:
        async for output in async_llm.generate("ab", LONG, "mine"):
            outputs.append(output)
            if len(outputs) == tokens:
                await async_llm.abort("mine")

    collecting = asyncio.create_task(collect())
    if not tokens:
        await small_cluster.calls.until(lambda: bool(small_cluster.calls.prefills))
        await async_llm.abort(["mine", "unknown"])
    await collecting
    assert (outputs[-1].outputs[0].text, outputs[-1].outputs[0].finish_reason) == ("Hel"[:tokens], "abort")
    assert outputs[-1].finished
    await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)


async def test_leaving_the_iteration_ends_the_request(small_cluster: ScriptedCluster, async_llm: AsyncLLM) -> None:
    small_cluster.script.pace = asyncio.Semaphore(1)
    stream = async_llm.generate("ab", LONG, "mine")
    await anext(stream)
    with pytest.raises(ValueError, match="'mine' runs already"):
        await anext(async_llm.generate("cd", LONG, "mine"))
    await stream.aclose()
    await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)
    small_cluster.script.pace = None
    assert [output async for output in async_llm.generate("ab", LONG, "mine")][-1].finished


async def test_a_request_that_is_cancelled_by_its_id_is_an_error(
    small_cluster: ScriptedCluster, async_llm: AsyncLLM
) -> None:
    small_cluster.script.pace = asyncio.Semaphore(1)
    stream = async_llm.generate("ab", LONG, "mine")
    await anext(stream)
    await small_cluster.post("/v1/requests/mine/cancel")
    with pytest.raises(Cancelled):
        async for _ in stream:
            pass


async def test_embeddings_have_vllms_fields_in_the_order_of_the_prompts(
    small_cluster: ScriptedCluster, llm: LLM, async_llm: AsyncLLM
) -> None:
    prompts: list[Any] = ["ab", tokens_of("cd"), {"prompt": "ef", "cache_salt": "s"}]
    params = [PoolingParams(dimensions=4), PoolingParams(pooling="mean", normalize=False), PoolingParams()]
    outputs = await _blocking(llm.embed, prompts, pooling_params=params, use_tqdm=False)
    assert [each.prompt_token_ids for each in outputs] == [tokens_of(text) for text in ("ab", "cd", "ef")]
    assert [each.outputs.hidden_size for each in outputs] == [4, 16, 16]
    assert [each.finished for each in outputs] == [True] * 3
    sent = {bytes(each.prompt_token_ids): each for each in small_cluster.calls.prefills}
    assert [pooling_from_wire(sent[text].pooling).normalizes for text in (b"ab", b"cd", b"ef")] == [True, False, True]
    assert sent[b"ef"].cache_salt == b"s"
    for one in (tokens_of("cd"), "cd"):
        body = {"model": NAME, "input": one, "pooling": "mean", "normalize": False}
        answer = (await small_cluster.post("/v1/embeddings", body))[1]
        assert answer["data"][0]["embedding"] == outputs[1].outputs.embedding
        assert "prompt_token_ids" not in answer["data"][0]
    again = await async_llm.embed(prompts, pooling_params=params)
    assert [each.outputs for each in again] == [each.outputs for each in outputs]
    status, record = await small_cluster.get(f"/v1/requests/{outputs[0].request_id}/trace")
    assert (status, record.get("endpoint")) == (200, "/v1/embeddings"), record


async def test_embeddings_do_not_change_the_seeds_of_outputs(small_cluster: ScriptedCluster, llm: LLM) -> None:
    await _blocking(llm.embed, ["a", "b"], use_tqdm=False)
    [output] = await _blocking(llm.generate, "a", LONG, use_tqdm=False)
    assert output.seed == derived_seed(0, 0)


async def test_scores_are_those_of_the_http_api_and_each_text_is_embedded_once(
    small_cluster: ScriptedCluster, llm: LLM, async_llm: AsyncLLM
) -> None:
    many = ["abc", "cab", "xyz", "abc"]
    for first in ("abd", ["abd", "abc", "q", "xyz"]):
        small_cluster.calls.prefills.clear()
        outputs = await _blocking(llm.score, first, many, use_tqdm=False, pooling_params=PoolingParams(pooling="mean"))
        texts = {*([first] if isinstance(first, str) else first), *many}
        assert len(small_cluster.calls.prefills) == len(texts)
        body = {"model": NAME, "text_1": first, "text_2": many, "pooling": "mean"}
        answer = (await small_cluster.post("/v1/score", body))[1]
        assert [each.outputs.score for each in outputs] == [each["score"] for each in answer["data"]]
        again = await async_llm.score(first, many, pooling_params=PoolingParams(pooling="mean"))
        assert [each.outputs for each in again] == [each.outputs for each in outputs]
    assert outputs[0].prompt_token_ids == tokens_of("abdabc")


async def test_what_cannot_be_embedded_is_named(small_cluster: ScriptedCluster, llm: LLM) -> None:
    with pytest.raises(PromptRefused, match=r"Prompt 1 of 2: .*300 tokens") as refused:
        await _blocking(llm.embed, ["a", "x" * 300], use_tqdm=False)
    assert (refused.value.index, refused.value.param) == (1, "input")
    with pytest.raises(PromptRefused, match=r"Prompt 2 of 3: .*300 tokens") as refused:
        await _blocking(llm.score, "a", ["a", "b", "x" * 300], use_tqdm=False)
    assert refused.value.index == 2
    with pytest.raises(PromptRefused, match="`dimensions` is 17"):
        await _blocking(llm.embed, "a", use_tqdm=False, pooling_params=PoolingParams(dimensions=17))
    with pytest.raises(ValueError, match="`data_1` has 2 texts and `data_2` 3"):
        llm.score(["a", "b"], ["c", "d", "e"])
    with pytest.raises(ValueError, match="`data_2` is a text or a list"):
        llm.score("a", [])
    with pytest.raises(ValueError, match="Scores have no parameter 'dimensions'"):
        llm.score("a", "b", pooling_params=PoolingParams(dimensions=3))
    await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)


async def test_shutdown_ends_embeddings(small_cluster: ScriptedCluster, async_llm: AsyncLLM) -> None:
    small_cluster.script.fail("prefill", lambda _: asyncio.Event().wait())  # type: ignore[arg-type, return-value]
    waiting = asyncio.create_task(async_llm.embed(["a"]))
    await small_cluster.calls.until(lambda: bool(small_cluster.calls.prefills))
    await async_llm.shutdown()
    with pytest.raises(ShutDown):
        await waiting
    await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)


async def test_shutdown_ends_the_calls_of_other_threads(small_cluster: ScriptedCluster, llm: LLM) -> None:
    """Fails if a thread that generates waits for ever."""
    small_cluster.script.pace = asyncio.Semaphore(0)
    waiting = [asyncio.create_task(_blocking(llm.generate, ["a", "b"], LONG, use_tqdm=False)) for _ in range(2)]
    await small_cluster.calls.until(lambda: len(small_cluster.calls.decode_starts) == 4)
    tokenizer = await _blocking(llm.get_tokenizer)
    await _blocking(llm.shutdown)
    for call in waiting:
        with pytest.raises(ShutDown, match="This LLM was shut down"):
            await call
    await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)
    with pytest.raises(ShutDown):
        await _blocking(llm.generate, "a")
    with pytest.raises(ShutDown):
        await _blocking(tokenizer.encode, "a")


@pytest.mark.parametrize("has_output", [True, False])
async def test_shutdown_ends_requests_of_a_cluster_that_goes_on(
    small_cluster: ScriptedCluster, async_llm: AsyncLLM, has_output: bool
) -> None:
    """Fails if they are sent again, as after a connection that is lost."""
    small_cluster.script.pace = asyncio.Semaphore(1 if has_output else 0)
    if not has_output:
        small_cluster.script.fail("prefill", lambda _: asyncio.Event().wait())  # type: ignore[arg-type, return-value]
    has_first = asyncio.Event()

    async def collect() -> None:
        async for _ in async_llm.generate("ab", LONG, "mine"):
            has_first.set()

    collecting = asyncio.create_task(collect())
    if has_output:
        await has_first.wait()
    else:
        await small_cluster.calls.until(lambda: bool(small_cluster.calls.prefills))
    await async_llm.shutdown()
    with pytest.raises(ShutDown):
        await collecting
    await small_cluster.calls.until(lambda: small_cluster.calls.num_open == 0)
    with pytest.raises(ShutDown):
        await anext(async_llm.generate("ab", LONG))
