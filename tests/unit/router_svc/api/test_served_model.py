"""Long texts do not block the event loop, and texts that can never fit are refused without tokenizing them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import cast

import pytest

from pdserve.base.errors import RequestError
from pdserve.model.resolve import resolve_model
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.served_model import ServedModel


@pytest.fixture(scope="module")
def model() -> ServedModel:
    resolved = resolve_model()
    return ServedModel.load(resolved.path, resolved.served_name)


class WatchedTokenizer:
    """A tokenizer that notes whether the event loop ran a callback during `encode`."""

    def __init__(self, tokenizer: Tokenizer, loop: asyncio.AbstractEventLoop) -> None:
        self._tokenizer = tokenizer
        self._loop = loop
        self.loop_has_run = False

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        has_run = threading.Event()
        self._loop.call_soon_threadsafe(has_run.set)
        token_ids = self._tokenizer.encode(text, add_special_tokens)
        self.loop_has_run = has_run.is_set()
        return token_ids


async def test_the_event_loop_runs_while_a_long_text_is_tokenized(model: ServedModel) -> None:
    # It runs only if the text is tokenized in a thread, and if that releases the interpreter's lock.
    text = "The quick brown fox jumps over the lazy dog; 오늘 날씨. " * 20_000
    watched = WatchedTokenizer(model.tokenizer, asyncio.get_running_loop())
    [token_ids] = await replace(model, tokenizer=cast(Tokenizer, watched)).encode([text], add_special_tokens=False)
    assert len(token_ids) > 100_000
    assert watched.loop_has_run


def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it(model: ServedModel) -> None:
    limit = model.tokenizer.max_token_bytes * model.max_position_embeddings
    with pytest.raises(RequestError, match="at least 8192 tokens, but the context holds 8192"):
        model.require_plausible("x" * limit, param="prompt")
    model.require_plausible("x" * (limit - 1), param="prompt")
    assert all(
        len(model.tokenizer.token_bytes(token)) <= model.tokenizer.max_token_bytes
        for token in range(model.tokenizer.vocab_size)
    )
