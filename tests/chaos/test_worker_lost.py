"""kill -9, SIGSTOP and disconnects at every stage of a request: the client hears of it rightly, and nothing leaks."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import openai
import pytest

from tests.support.cluster import MODEL, Cluster, WorkerView

pytestmark = pytest.mark.timeout(300)


def _long_prompt(first: int, length: int = 1600) -> list[int]:
    """Some seconds of prefill; token ids that no other test uses."""
    return [first, *((first * 17 + 11 * place) % 40_000 + 100 for place in range(1, length))]


async def _text(client: openai.AsyncOpenAI, prompt: Any, max_tokens: int = 12) -> str:
    stream = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


def _busy_prefill(cluster: Cluster) -> WorkerView | None:
    return next((worker for worker in cluster.workers("prefill") if worker.running), None)


async def _trace(client: openai.AsyncOpenAI, cluster: Cluster, request_id: str) -> Any:
    return await client.get(f"{cluster.base_url}/v1/requests/{request_id}/trace", cast_to=object)


async def test_a_killed_prefill_worker_is_replaced_by_another_and_the_answer_is_the_same(fragile: Cluster) -> None:
    prompt = _long_prompt(2001)
    async with fragile.async_client() as client:
        request = asyncio.create_task(_text(client, prompt))
        busy = await fragile.until_async(lambda: _busy_prefill(fragile), "a prefill worker computes")
        assert busy is not None
        fragile.kill(busy.worker_id)
        disturbed = await request
        await fragile.until_async(lambda: len(fragile.workers("prefill")) == 2, "restarted", timeout_s=60)
        assert await _text(client, prompt) == disturbed


async def test_with_every_prefill_worker_killed_the_decode_worker_prefills(fragile: Cluster) -> None:
    prompt = _long_prompt(2002, 800)
    async with fragile.async_client() as client:
        request = asyncio.create_task(_text(client, prompt))
        await fragile.until_async(lambda: _busy_prefill(fragile), "a prefill worker computes")
        for name in ("prefill-0", "prefill-1"):
            fragile.kill(name)
        disturbed = await request
        await fragile.until_async(lambda: len(fragile.workers("prefill")) == 2, "restarted", timeout_s=60)
        assert await _text(client, prompt) == disturbed
    router = f"127.0.0.1:{fragile.port}"
    assert fragile.metric(router, "pdserve_prefill_fallbacks_total") > 0


async def test_a_frozen_prefill_worker_is_given_up_after_the_lease(fragile: Cluster) -> None:
    prompt = _long_prompt(2003)
    async with fragile.async_client() as client:
        request = asyncio.create_task(_text(client, prompt))
        busy = await fragile.until_async(lambda: _busy_prefill(fragile), "a prefill worker computes")
        assert busy is not None
        process = fragile.kill(busy.worker_id, signal.SIGSTOP)
        try:
            disturbed = await request
        finally:
            process.send_signal(signal.SIGCONT)
        assert await _text(client, prompt) == disturbed


async def test_a_killed_decode_worker_ends_its_streams_with_an_error_and_is_restarted(fragile: Cluster) -> None:
    async with fragile.async_client() as client:

        async def stream(number: int) -> tuple[str, openai.APIError | None]:
            text = ""
            try:
                async for chunk in await client.completions.create(
                    model=MODEL,
                    prompt=_long_prompt(2100 + number, 100),
                    max_tokens=2000,
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


async def test_a_decode_worker_killed_before_the_first_token_is_a_clean_error(fragile: Cluster) -> None:
    async with fragile.async_client() as client:
        request = asyncio.create_task(_text(client, _long_prompt(2300)))
        await fragile.until_async(lambda: _busy_prefill(fragile), "a prefill worker computes")
        fragile.kill("decode-0")
        with pytest.raises(openai.APIStatusError) as caught:
            await request
    assert caught.value.status_code in (502, 503)
    assert "decode" in caught.value.message


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_a_client_that_leaves_stops_the_compute_on_both_tiers(fragile: Cluster, phase: str) -> None:
    async with fragile.async_client() as client:
        request = asyncio.create_task(_text(client, _long_prompt(2400 + len(phase), 900), max_tokens=4000))
        if phase == "prefill":
            await fragile.until_async(lambda: _busy_prefill(fragile), "a prefill worker computes")
        else:
            before = fragile.worker_metric("decode", "pdserve_generation_tokens_total")
            await fragile.until_async(
                lambda: fragile.worker_metric("decode", "pdserve_generation_tokens_total") > before + 3, "it decodes"
            )
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
    fragile.wait_idle(timeout_s=5)


async def test_a_storm_of_disconnects_leaves_nothing_behind(fragile: Cluster) -> None:
    async with fragile.async_client() as client:
        requests = [asyncio.create_task(_text(client, _long_prompt(2500 + n, 200), max_tokens=200)) for n in range(24)]
        for number, request in enumerate(requests):
            await asyncio.wait([request], timeout=0.05 * (number % 5))
            request.cancel()
        await asyncio.gather(*requests, return_exceptions=True)
    fragile.wait_idle(timeout_s=15)
