"""kill -9, SIGSTOP and disconnects at every stage of a request: clients get correct results, and nothing leaks."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from tests.support.cluster import MODEL, Cluster, WorkerStatus
from tests.support.prefill_gate import PrefillGate

pytestmark = pytest.mark.timeout(300)


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
        await fragile.until_async(lambda: len(fragile.workers("prefill")) == 2, "restarted", timeout_s=60)
        assert await _text(client, prompt) == answer


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
        await fragile.until_async(lambda: len(fragile.workers("prefill")) == 2, "restarted", timeout_s=60)
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


async def test_a_killed_decode_worker_ends_its_streams_with_an_error_and_is_restarted(fragile: Cluster) -> None:
    async with fragile.async_client() as client:

        async def stream(number: int) -> tuple[str, openai.APIError | None]:
            text = ""
            try:
                async for chunk in await client.completions.create(
                    model=MODEL,
                    prompt=_long_prompt(2100 + number, 100),
                    max_tokens=7000,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    text += chunk.choices[0].text
                    started.release()
            except openai.APIError as error:
                return text, error
            return text, None

        started = asyncio.Semaphore(0)
        streams = [asyncio.create_task(stream(number)) for number in range(4)]
        for _ in range(60):
            await started.acquire()
        fragile.kill("decode-0")
        for text, error in await asyncio.gather(*streams):
            assert text
            assert error is not None
            assert "decode" in error.message
        await fragile.until_async(lambda: len(fragile.workers("decode")) == 1, "restarted", timeout_s=60)
        assert await _text(client, _long_prompt(2200, 100))


async def test_a_decode_worker_killed_before_the_first_token_is_a_clean_error(
    fragile: Cluster, prefill_gate: PrefillGate
) -> None:
    prompt = _long_prompt(2300)
    async with (
        fragile.async_client() as client,
        _held_in_prefill(fragile, prefill_gate, client, prompt) as (request, _),
    ):
        fragile.kill("decode-0")
        with pytest.raises(openai.APIStatusError) as caught:
            await request
    assert caught.value.status_code in (502, 503)
    assert "decode" in caught.value.message


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
    fragile.wait_idle(timeout_s=15)
