"""Whole requests with OpenAI's client."""

from __future__ import annotations

from tests.integration.router_svc.conftest import ScriptedCluster
from tests.support.tiny_model import NAME, tokens_of


async def test_a_completion_uses_both_tiers(cluster: ScriptedCluster) -> None:
    async with cluster.client() as client:
        completion = await client.completions.create(model=NAME, prompt="Say hello", max_tokens=50)
    assert completion.choices[0].text == "Hello world."
    assert completion.choices[0].finish_reason == "stop"
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (9, 13)
    assert len(cluster.calls.prefills) == 1
    assert len(cluster.calls.decode_starts) == 1
    assert list(cluster.calls.prefills[0].prompt_token_ids) == tokens_of("Say hello")


async def test_a_streamed_chat_sends_a_role_text_a_finish_reason_and_usage_in_order(cluster: ScriptedCluster) -> None:
    async with cluster.client() as client:
        stream = await client.chat.completions.create(
            model=NAME,
            messages=[{"role": "user", "content": "Say hello"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello world."
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 13
    assert all(chunk.usage is None for chunk in chunks[:-1])
