"""Text work of any size leaves the event loop alone, and what can never fit is not even tried."""

from __future__ import annotations

import asyncio
import time

import pytest

from pdserve.base.errors import RequestError
from pdserve.model.resolve import resolve_model
from router_svc.api.served_model import ServedModel


@pytest.fixture(scope="module")
def model() -> ServedModel:
    resolved = resolve_model()
    return ServedModel.load(resolved.path, resolved.served_name)


async def test_the_event_loop_goes_on_while_a_long_text_is_tokenized(model: ServedModel) -> None:
    text = "The quick brown fox jumps over the lazy dog; 오늘 날씨. " * 20_000
    began = time.monotonic()
    work = asyncio.ensure_future(model.encode([text], add_special_tokens=False))
    turns = 0
    while not work.done():
        await asyncio.sleep(0)
        turns += 1
    took_s = time.monotonic() - began
    assert len(work.result()[0]) > 100_000
    # A thread that held the interpreter would let the loop have a turn every few milliseconds at best.
    assert turns > 1000 * took_s


def test_a_text_that_cannot_fit_is_refused_untokenized(model: ServedModel) -> None:
    limit = model.tokenizer.max_token_bytes * model.max_position_embeddings
    with pytest.raises(RequestError, match="at least 8192 tokens, but the context holds 8192"):
        model.require_plausible("x" * limit, param="prompt")
    model.require_plausible("x" * (limit - 1), param="prompt")
    assert all(
        len(model.tokenizer.token_bytes(token)) <= model.tokenizer.max_token_bytes
        for token in range(model.tokenizer.vocab_size)
    )
