"""kill -9, SIGSTOP and disconnects at every stage of a request: clients get correct results, and nothing leaks."""

from __future__ import annotations

import asyncio
import functools
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.support.answers import OPEN_THINKING
from tests.support.cluster import MODEL, READY_S, Cluster, WorkerStatus
from tests.support.lazily import anthropic, openai
from tests.support.prefill_gate import PrefillGate


def _long_prompt(first: int, length: int = 1600) -> list[int]:
    """A prompt of many prefill chunks, with token ids that no other test uses."""
    return [first, *((first * 17 + 11 * position) % 40_000 + 100 for position in range(1, length))]


async def _text(client: openai.AsyncOpenAI, prompt: Any, max_tokens: int = 12) -> str:
    stream = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


def _busy_prefill(cluster: Cluster) -> WorkerStatus | None:
    return next((worker for worker in cluster.workers("prefill") if worker.running), None)


async def _trace(client: openai.AsyncOpenAI, cluster: Cluster, request_id: str) -> Any:
    return await client.get(f"{cluster.base_url}/v1/requests/{request_id}/trace", cast_to=object)


@asynccontextmanager
async def _held_in_prefill(
    cluster: Cluster, gate: PrefillGate, client: openai.AsyncOpenAI, prompt: list[int]
) -> AsyncIterator[tuple[asyncio.Task[str], WorkerStatus]]:
    """A request that is held in its prefill until the gate opens, and the worker that computes it."""
    with gate.closed():
        request = asyncio.create_task(_text(client, prompt))
        busy = await cluster.until_async(lambda: _busy_prefill(cluster), "a prefill worker computes")
        assert busy is not None
        yield request, busy


async def test_when_a_prefill_worker_is_killed_another_one_gives_the_same_answer(
    fragile: Cluster, prefill_gate: PrefillGate
) -> None:
    prompt = _long_prompt(2001)
    async with fragile.async_client() as client:
        async with _held_in_prefill(fragile, prefill_gate, client, prompt) as (request, busy):
            fragile.kill(busy.worker_id)
        answer = await request
        await fragile.until_async(lambda: len(fragile.workers("prefill")) == 2, "restarted", timeout_s=READY_S)
        assert await _text(client, prompt) == answer


async def test_when_a_prefill_worker_is_killed_while_it_scores_another_one_gives_the_same_scores(
    fragile: Cluster, prefill_gate: PrefillGate
) -> None:
    async with fragile.async_client() as client:

        async def scores() -> Any:
            answer = await client.completions.create(
                model=MODEL, prompt=_long_prompt(2009, 700), echo=True, logprobs=1, max_tokens=2, temperature=0
            )
            return answer.choices[0].logprobs

        with prefill_gate.closed():
            request = asyncio.create_task(scores())
            busy = await fragile.until_async(lambda: _busy_prefill(fragile), "a prefill worker scores")
            assert busy is not None
            fragile.kill(busy.worker_id)
        answer = await request
        assert len(answer.token_logprobs) == 702
        await fragile.until_async(lambda: len(fragile.workers("prefill")) == 2, "restarted", timeout_s=READY_S)
        assert await scores() == answer


async def test_when_all_prefill_workers_are_killed_the_decode_worker_prefills(
    fragile: Cluster, prefill_gate: PrefillGate
) -> None:
    router = f"127.0.0.1:{fragile.port}"
    fallbacks = fragile.metric(router, "pdserve_prefill_fallbacks_total")
    prompt = _long_prompt(2002, 800)
    async with fragile.async_client() as client:
        async with _held_in_prefill(fragile, prefill_gate, client, prompt) as (request, _):
            for name in ("prefill-0", "prefill-1"):
                fragile.kill(name)
            # With the gate closed, no restarted prefill worker can have computed the prompt.
            answer = await request
        await fragile.until_async(lambda: len(fragile.workers("prefill")) == 2, "restarted", timeout_s=READY_S)
        assert await _text(client, prompt) == answer
    assert fragile.metric(router, "pdserve_prefill_fallbacks_total") > fallbacks


async def test_a_frozen_prefill_worker_is_replaced_after_the_lease(fragile: Cluster, prefill_gate: PrefillGate) -> None:
    prompt = _long_prompt(2003)
    async with fragile.async_client() as client:
        async with _held_in_prefill(fragile, prefill_gate, client, prompt) as (request, busy):
            process = fragile.kill(busy.worker_id, signal.SIGSTOP)
        try:
            answer = await request
        finally:
            process.send_signal(signal.SIGCONT)
        assert await _text(client, prompt) == answer


#: Tokens of a choice, where a test needs no more.
_MAX_TOKENS = 60
#: A token that is sampled as soon as it may be. As a stop token, that is right behind `min_tokens`.
_LIKELIEST = 1000
#: A chat that has to call a function, with arguments that take long.
CALLING: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Which rivers cross a desert, and which of them are long? " * 8}],
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "note",
                "parameters": {
                    "type": "object",
                    "properties": {"text": {"type": "string", "minLength": 4000}},
                    "required": ["text"],
                },
            },
        }
    ],
    "tool_choice": "required",
}
#: Requests with one prompt each: everything that decides about later tokens by earlier ones.
BODIES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 3, "n": 3},
    {"temperature": 1.0, "seed": 4, "frequency_penalty": 0.6, "presence_penalty": 0.3, "logprobs": 2},
    {
        "temperature": 0.8,
        "seed": 5,
        "logit_bias": {str(_LIKELIEST): 100},
        "extra_body": {"repetition_penalty": 1.2, "top_k": 30, "stop_token_ids": [_LIKELIEST]},
    },
    # The next worker replays the tokens to know which ones may follow.
    {"temperature": 0.9, "seed": 6, "extra_body": {"guided_regex": "([a-z]{1,9} ){2000}"}},
    # What is forbidden follows from the last tokens, also behind those of another worker.
    {
        "temperature": 0.9,
        "seed": 7,
        "logprobs": 1,
        "extra_body": {
            "bad_words": ["the", "of a", "in the"],
            "allowed_token_ids": [*range(20, 12_000)],
            "logprob_token_ids": [28],
        },
    },
    # Chats. Of two calls, a client that continues one gets the rest of its arguments alone.
    {"temperature": 0.9, "seed": 8, "n": 2, **CALLING},
    # The next worker knows how much was thought, and what has to follow behind it.
    {
        "temperature": 0.8,
        "seed": 9,
        **CALLING,
        "extra_body": {"chat_template": OPEN_THINKING, "thinking_token_budget": 25},
    },
]


def _min_tokens(max_tokens: int) -> int:
    """Tokens of a request that would end at once: almost all, since tests need streams that last."""
    return max_tokens - 10


def _stop_late_in(text: str) -> str:
    """A stop string that `text` contains once, near its end: the shortest of at least 8 characters."""
    end = len(text) - 5
    return next(text[start:end] for start in range(end - 8, -1, -1) if text.find(text[start:end]) == start)


def _written(choice: Any) -> Iterator[tuple[Any, str]]:
    """What a chunk adds to a choice, by its index, and in chats by what it is."""
    if not hasattr(choice, "delta"):
        yield choice.index, choice.text
        return
    delta = choice.delta
    yield (choice.index, "content"), delta.content or ""
    yield (choice.index, "reasoning"), getattr(delta, "reasoning", None) or ""
    for call in delta.tool_calls or ():
        yield (choice.index, "id", call.index), (call.id or "") and "an id"
        yield (choice.index, "name", call.index), call.function.name or ""
        yield (choice.index, "arguments", call.index), call.function.arguments or ""


async def choices_of(
    client: openai.AsyncOpenAI,
    number: int,
    started: asyncio.Semaphore | None = None,
    *,
    max_tokens: int = _MAX_TOKENS,
    stop: str | None = None,
) -> Any:
    """Texts, log-probabilities and end of each choice of one request, and its usage; streamed."""
    extra = {"ignore_eos": True, **BODIES[number].get("extra_body", {})}
    if "stop_token_ids" in extra:
        extra["min_tokens"] = _min_tokens(max_tokens)
    body = {"model": MODEL, "max_tokens": max_tokens, "stop": stop, "stream_options": {"include_usage": True}}
    body |= BODIES[number] | {"extra_body": extra}
    if "messages" in body:
        stream: Any = await client.chat.completions.create(stream=True, **body)
    else:
        stream = await client.completions.create(stream=True, prompt=_long_prompt(2100 + number, 100), **body)
    texts: dict[Any, str] = {}
    logprobs: dict[int, list[float | None]] = {}
    reasons: dict[int, str] = {}
    usage = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            for kind, text in _written(choice):
                texts[kind] = texts.get(kind, "") + text
            if choice.logprobs is not None:
                logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs or ())
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        if started is not None and chunk.choices:
            started.release()
    assert usage is not None
    return texts, logprobs, reasons, (usage.prompt_tokens, usage.completion_tokens)


async def streams_until(
    is_over: asyncio.Event, client: openai.AsyncOpenAI, number: int, expected: Any, *, max_tokens: int
) -> int:
    """Sends one request again and again, each time with the expected answer. Returns how many there were."""
    count = 0
    while not is_over.is_set():
        assert await choices_of(client, number, max_tokens=max_tokens) == expected
        count += 1
    return count


async def _message(client: anthropic.AsyncAnthropic, started: asyncio.Semaphore) -> Any:
    """Content and end of a message of Anthropic's API; streamed."""
    long_text: Any = {"format": {"type": "json_schema", "schema": {"type": "string", "minLength": 400}}}
    async with client.messages.stream(
        model=MODEL,
        max_tokens=_MAX_TOKENS,
        messages=[{"role": "user", "content": "Tell a story."}],
        output_config=long_text,
        extra_body={"seed": 8, "temperature": 0.9},
    ) as stream:
        async for event in stream:
            if event.type == "text":
                started.release()
        message = await stream.get_final_message()
    return message.content, message.stop_reason, message.usage.output_tokens


async def test_streams_outlive_their_decode_worker(fragile: Cluster) -> None:
    """The only decode worker is killed while streams are open: each goes on, as if nothing had happened."""
    numbers = range(len(BODIES))
    async with fragile.async_client() as client, fragile.anthropic_client() as messages:
        texts, *_ = await choices_of(client, 1)
        stops = {1: _stop_late_in(texts[0])}  # It ends one choice of three.
        undisturbed = [await choices_of(client, number, stop=stops.get(number)) for number in numbers]
        assert texts[0].startswith(undisturbed[1][0][0] + stops[1]), "the stop string ends no choice"
        *_, reasons, (_, num_tokens) = undisturbed[3]
        assert (reasons, num_tokens) == ({0: "stop"}, _min_tokens(_MAX_TOKENS) + 1), "min_tokens changes nothing"
        undisturbed.append(await _message(messages, asyncio.Semaphore(0)))
        assert undisturbed[-1][1:] == ("max_tokens", _MAX_TOKENS)
        while True:
            started = [asyncio.Semaphore(0) for _ in undisturbed]
            streams = [
                asyncio.create_task(choices_of(client, number, started[number], stop=stops.get(number)))
                for number in numbers
            ]
            streams.append(asyncio.create_task(_message(messages, started[-1])))
            for each in started:
                for _ in range(8):
                    await each.acquire()
            if not any(stream.done() for stream in streams):
                break
            # This process stood still until one was over: again.
            assert await asyncio.gather(*streams) == undisturbed
        fragile.kill("decode-0")
        assert await asyncio.gather(*streams) == undisturbed
        await fragile.until_async(lambda: len(fragile.workers("decode")) == 1, "restarted", timeout_s=READY_S)


def _is_decoded_or_over(cluster: Cluster, request: asyncio.Task[Any]) -> bool:
    return request.done() or cluster.workers("decode")[0].running > 0


async def test_a_response_that_is_not_streamed_outlives_both_of_its_workers(fragile: Cluster) -> None:
    prompt = _long_prompt(2250, 100)
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 120, "temperature": 0.7, "seed": 11}
    fields |= {"extra_body": {"ignore_eos": True}}
    async with fragile.async_client() as client:
        text = (await client.completions.create(**fields)).choices[0].text
        stop = _stop_late_in(text)
        fields["stop"] = [stop]
        undisturbed = await client.completions.create(**fields)
        assert text.startswith(undisturbed.choices[0].text + stop), "the stop string does not end it"
        while True:
            request = asyncio.create_task(client.completions.create(**fields))
            is_decoded = functools.partial(_is_decoded_or_over, fragile, request)
            await fragile.until_async(is_decoded, "it is decoded")
            if not request.done():
                break
            # It was over before anything was seen of it: again.
        for name in ("prefill-0", "decode-0", "prefill-1"):
            fragile.kill(name)
        answer = await request
    assert answer.choices == undisturbed.choices
    assert answer.usage is not None
    assert undisturbed.usage is not None
    # How much of the prompt was cached depends on whether the first token was there before the kills.
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert answer.usage.model_dump(include=set(counts)) == undisturbed.usage.model_dump(include=set(counts))


async def test_a_decode_worker_killed_before_the_first_token_costs_no_answer(
    fragile: Cluster, prefill_gate: PrefillGate
) -> None:
    prompt = _long_prompt(2300)
    async with fragile.async_client() as client:
        async with _held_in_prefill(fragile, prefill_gate, client, prompt) as (request, _):
            fragile.kill("decode-0")
        answer = await request
        assert await _text(client, prompt) == answer


async def test_a_disconnect_during_prefill_stops_the_compute_on_both_tiers(
    fragile: Cluster, prefill_gate: PrefillGate
) -> None:
    prompt = _long_prompt(2407, 900)
    async with (
        fragile.async_client() as client,
        _held_in_prefill(fragile, prefill_gate, client, prompt) as (request, _),
    ):
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        # The gate is still closed, so the prompt cannot have been computed to its end.
        await asyncio.to_thread(fragile.wait_idle)


async def test_a_disconnect_during_decode_stops_the_compute_on_both_tiers(fragile: Cluster) -> None:
    generated = fragile.worker_metric("decode", "pdserve_generation_tokens_total")
    max_tokens = 4000
    async with fragile.async_client() as client:
        stream = await client.completions.create(
            model=MODEL,
            prompt=_long_prompt(2406, 900),
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(4):
            await anext(stream)
        await stream.close()
    fragile.wait_idle()
    assert fragile.worker_metric("decode", "pdserve_generation_tokens_total") < generated + max_tokens


async def test_many_disconnects_leak_nothing(fragile: Cluster) -> None:
    async with fragile.async_client() as client:
        requests = [asyncio.create_task(_text(client, _long_prompt(2500 + n, 200), max_tokens=200)) for n in range(24)]
        for number, request in enumerate(requests):
            await asyncio.wait([request], timeout=0.05 * (number % 5))
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
    fragile.wait_idle()
