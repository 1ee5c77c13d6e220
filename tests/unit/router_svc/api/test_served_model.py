"""Long texts do not block the event loop, and texts that can never fit are refused without tokenizing them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any, cast

import pytest

from pdserve.base.errors import RequestError
from pdserve.model.chat_template import ChatTemplate
from pdserve.model.resolve import resolve_model
from pdserve.model.tokenizer import Tokenizer
from router_svc.api.served_model import ServedModel


@pytest.fixture(scope="module")
def model() -> ServedModel:
    resolved = resolve_model()
    return ServedModel.load(resolved.path, resolved.served_name)


@pytest.mark.parametrize("text", ["i", "end", "|", "im_", "The capital"])
async def test_an_answer_goes_on_right_behind_a_message_whatever_its_text(model: ServedModel, text: str) -> None:
    """The template has such texts behind the message, too: those of its special tokens."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
    whole, continued = [
        await model.encode_chat(
            messages, add_generation_prompt=False, add_special_tokens=False, template_kwargs={}, continues=continues
        )
        for continues in (False, True)
    ]
    shown, end = model.tokenizer.decode(whole, False), f"{text}<|im_end|>\n"
    assert shown.endswith(end)
    assert model.tokenizer.decode(continued, False) == shown.removesuffix("<|im_end|>\n")


class WatchedTokenizer:
    """A tokenizer that notes whether the event loop ran a callback during `encode`, which takes `grace_s` longer."""

    def __init__(self, tokenizer: Tokenizer, loop: asyncio.AbstractEventLoop, *, grace_s: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self._loop = loop
        self._grace_s = grace_s
        self.loop_has_run = False
        self.max_token_bytes = tokenizer.max_token_bytes
        self.literal = tokenizer.literal

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        has_run = threading.Event()
        self._loop.call_soon_threadsafe(has_run.set)
        token_ids = self._tokenizer.encode(text, add_special_tokens)
        self.loop_has_run = has_run.wait(self._grace_s)
        return token_ids


class CountingTokenizer:
    """A tokenizer that counts the characters that it has tokenized."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.max_token_bytes = tokenizer.max_token_bytes
        self.literal = tokenizer.literal
        self.characters = 0

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode(text, add_special_tokens)

    def count_up_to(self, text: str, limit: int) -> int:
        return Tokenizer.count_up_to(cast(Tokenizer, self), text, limit)


async def test_the_event_loop_runs_while_a_long_text_is_tokenized(model: ServedModel) -> None:
    # It runs only if the text is tokenized in a thread, and if that releases the interpreter's lock.
    text = "The quick brown fox jumps over the lazy dog; 오늘 날씨. " * 20_000
    watched = WatchedTokenizer(model.tokenizer, asyncio.get_running_loop())
    roomy = replace(model, tokenizer=cast(Tokenizer, watched), max_context=10**6)
    [token_ids] = await roomy.encode([text], add_special_tokens=False)
    assert len(token_ids) > 100_000
    assert watched.loop_has_run


async def test_a_text_of_short_tokens_is_refused_after_a_piece_of_it_is_tokenized(model: ServedModel) -> None:
    """Finding 2. Fails without the count in pieces of `require_plausible`.

    `encode_batch_fast` is no guard: with `encode_batch`, long texts take a third more time and as much memory.
    """
    # By its bytes it could fit: the longest token has 162 bytes. Each of its tokens has two.
    text = " a" * (40 * model.max_context)
    counting = CountingTokenizer(model.tokenizer)
    with pytest.raises(RequestError, match=r"at least \d+ tokens, but the context holds 8192"):
        await replace(model, tokenizer=cast(Tokenizer, counting)).encode([text], add_special_tokens=False)
    assert counting.characters < len(text) / 4


async def test_prompts_after_one_that_is_too_long_are_not_tokenized(model: ServedModel) -> None:
    """Finding 4. Fails without `require_fits` in the loop of `encode`."""
    texts = ["a " * 20_000] * 50
    counting = CountingTokenizer(model.tokenizer)
    with pytest.raises(RequestError, match="but the context holds 8192"):
        await replace(model, tokenizer=cast(Tokenizer, counting)).encode(
            texts, add_special_tokens=False, max_model_len=8192
        )
    assert counting.characters == len(texts[0])


async def test_too_many_token_ids_are_refused_before_their_values_are_read(model: ServedModel) -> None:
    """Finding 8. Fails without `require_fits` in `check_prompts`: what is refused is then the last id."""
    with pytest.raises(RequestError, match="9001 tokens, but the context holds 8192"):
        await model.check_prompts([[1] * 9000 + [10**9]], 8192)


@pytest.mark.parametrize("times", [300, 100], ids=["much", "little for much"])
async def test_what_a_template_prints_of_its_variables_is_tokenized_in_a_thread(model: ServedModel, times: int) -> None:
    """Finding 9. Fails where the size of the text that a template made does not decide again."""
    template = ChatTemplate("{% for message in messages %}{{ mood * 100 }}{% endfor %}", {})
    # So little is tokenized before a busy machine has run the loop.
    watched = WatchedTokenizer(model.tokenizer, asyncio.get_running_loop(), grace_s=5.0)
    roomy = replace(model, template=template, tokenizer=cast(Tokenizer, watched), max_context=10**6)
    await roomy.encode_chat(
        [{"role": "user", "content": ""}],
        add_generation_prompt=True,
        add_special_tokens=False,
        template_kwargs={"mood": "a b " * times},
    )
    assert watched.loop_has_run


async def test_long_variables_are_rendered_in_a_thread(model: ServedModel) -> None:
    threads: list[threading.Thread] = []

    class WatchedTemplate(ChatTemplate):
        def render(self, *args: Any, **kwargs: Any) -> str:
            threads.append(threading.current_thread())
            return super().render(*args, **kwargs)

    await replace(model, template=WatchedTemplate("x", {})).encode_chat(
        [{"role": "user", "content": ""}],
        add_generation_prompt=True,
        add_special_tokens=False,
        template_kwargs={"mood": "a b " * 300},
    )
    assert threads
    assert threads[0] is not threading.current_thread()


def test_a_text_that_cannot_fit_is_refused_without_tokenizing_it(model: ServedModel) -> None:
    limit = model.tokenizer.max_token_bytes * model.max_context
    with pytest.raises(RequestError, match="at least 8192 tokens, but the context holds 8192"):
        model.require_plausible("x" * limit, param="prompt")
    model.require_plausible(" international" * 8000, param="prompt")
    assert all(
        len(model.tokenizer.token_bytes(token)) <= model.tokenizer.max_token_bytes
        for token in range(model.tokenizer.vocab_size)
    )
