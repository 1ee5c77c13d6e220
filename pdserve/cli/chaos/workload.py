"""The requests of a run: every feature that decides about later tokens by earlier ones. Pure: a seed gives them all."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from pdserve.cli.bench.words import WORDS

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MIN_OUTPUT_LEN = 16
_LONG_PROMPT_WORDS = 900
#: One in so many requests has a long prompt.
_LONG_EVERY = 12
#: Fields that a request has without tools: an output has one structure, and no call has only some tokens.
_STRUCTURES = {"response_format", "structured_outputs", "guided_choice", "allowed_token_ids"}
#: Whatever the model is, an answer to this starts within thinking.
_OPEN_THINKING = (
    "{% for each in messages %}<|im_start|>{{ each.role }}\n{{ each.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosRequest:
    """One of the different requests. `body` has neither the model nor a cache salt."""

    index: int
    path: str
    body: dict[str, Any]

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes as events."""
        return bool(self.body.get("stream"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One request to send. Others with the same `request` must get the same answer."""

    number: int
    request: ChaosRequest
    #: Keeps the prompt's blocks from those of other requests, so that it is computed and handed over. None: shared.
    cache_salt: str | None
    #: Index of the router that gets it first.
    router: int

    def body(self, model: str) -> dict[str, Any]:
        """The JSON body."""
        salt = {} if self.cache_salt is None else {"cache_salt": self.cache_salt}
        return {"model": model, **self.request.body, **salt}


def distinct_requests(seed: int, count: int, *, max_output_len: int) -> list[ChaosRequest]:
    """`count` different requests."""
    rng = random.Random(f"requests:{seed}")
    return [_request(rng, index, max_output_len) for index in range(count)]


def sendings(seed: int, requests: list[ChaosRequest], count: int, *, num_routers: int) -> list[Sending]:
    """`count` requests in the order in which they are sent."""
    rng = random.Random(f"sendings:{seed}")
    return [_sending(rng, seed, requests, number, num_routers) for number in range(count)]


def burst(seed: int, requests: list[ChaosRequest], first: int, count: int, *, num_routers: int) -> list[Sending]:
    """`count` more requests with long prompts, which fill KV caches."""
    rng = random.Random(f"burst:{seed}:{first}")
    long = [each for each in requests if is_long(each)] or requests
    return [_sending(rng, seed, long, first + number, num_routers, shares=0.0) for number in range(count)]


def is_long(request: ChaosRequest) -> bool:
    """Whether it has one of the long prompts."""
    return request.index % _LONG_EVERY == _LONG_EVERY - 1


def _sending(
    rng: random.Random, seed: int, requests: list[ChaosRequest], number: int, num_routers: int, shares: float = 0.3
) -> Sending:
    request = rng.choice(requests)
    salt = None if rng.random() < shares else f"chaos-{seed}-{number}"
    return Sending(number=number, request=request, cache_salt=salt, router=rng.randrange(num_routers))


def _request(rng: random.Random, index: int, max_output_len: int) -> ChaosRequest:
    is_chat = rng.random() < 0.4
    is_streamed = rng.random() < 0.7
    num_words = _LONG_PROMPT_WORDS if index % _LONG_EVERY == _LONG_EVERY - 1 else _prompt_words(rng)
    text = " ".join(rng.choices(WORDS, k=num_words))
    body: dict[str, Any] = {"max_tokens": rng.randint(MIN_OUTPUT_LEN, max_output_len)}
    body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": _prompts(rng, text)}
    body |= _sampling(rng) | _ending(rng, body["max_tokens"]) | _logprobs(rng, is_chat=is_chat) | _structure(rng)
    if is_chat and not _STRUCTURES & body.keys():
        body |= _tools(rng)
    if is_chat:
        body |= _thinking(rng)
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return ChaosRequest(index=index, path=CHAT if is_chat else COMPLETIONS, body=body)


def _prompts(rng: random.Random, text: str) -> str | list[str]:
    """Several prompts, which share a stream, for one completion in four."""
    if rng.random() >= 1 / 4:
        return text
    return [text, *(" ".join(rng.choices(WORDS, k=_prompt_words(rng))) for _ in range(rng.randint(1, 2)))]


def _prompt_words(rng: random.Random) -> int:
    return rng.randint(8, 60) if rng.random() < 0.3 else rng.randint(60, 300)


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Greedy or sampled, with penalties at times, and with three choices at times."""
    fields: dict[str, Any] = {"temperature": 0}
    if rng.random() < 0.6:
        fields = {"temperature": rng.choice((0.6, 0.9, 1.2)), "seed": rng.randrange(2**31)}
        fields |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}))
        if rng.random() < 0.25:
            fields["n"] = 3
    if rng.random() < 0.25:
        penalties = ({"frequency_penalty": 0.6}, {"presence_penalty": 0.8}, {"repetition_penalty": 1.2})
        fields |= rng.choice(penalties)
    return fields


def _ending(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """What ends the output besides its length."""
    match rng.randrange(4):
        case 0:
            return {"stop": rng.sample((" the", ".", "ing", "\n\n", ", and"), k=2)}
        case 1:
            return {"min_tokens": rng.randint(1, max_tokens)}
        case 2:
            return {"stop": [" and"], "min_tokens": rng.randint(1, max_tokens)}
    return {"ignore_eos": True}


def _structure(rng: random.Random) -> dict[str, Any]:
    """What the output has to match or to avoid, for one request in six."""
    if rng.random() >= 1 / 6:
        return {}
    schema = {"type": "object", "properties": {"words": {"type": "array", "items": {"type": "string"}}}}
    named = {"type": "json_schema", "json_schema": {"name": "words", "schema": schema | {"required": ["words"]}}}
    return rng.choice(
        (
            {"response_format": named},
            {"structured_outputs": {"regex": "([a-z]+ ?)+"}},
            {"guided_choice": list(WORDS[:40])},
            {"bad_words": ["the", "of", "and a"]},
            {"allowed_token_ids": list(range(30, 250))},
        )
    )


def _tools(rng: random.Random) -> dict[str, Any]:
    """Functions that the answer has to call, or may call, for one request in four."""
    if rng.random() >= 1 / 4:
        return {}
    parameters = {"type": "object", "properties": {"words": {"type": "array", "items": {"type": "string"}}}}
    function = {"name": "write", "parameters": parameters | {"required": ["words"]}}
    return {"tools": [{"type": "function", "function": function}], "tool_choice": rng.choice(("auto", "required"))}


def _thinking(rng: random.Random) -> dict[str, Any]:
    """Thinking that ends by itself or by a budget, for one chat in three, also before an object or a call."""
    if rng.random() >= 1 / 3:
        return {}
    return {"chat_template": _OPEN_THINKING, "thinking_token_budget": rng.choice((0, 3, 10, 30, -1))}


def _logprobs(rng: random.Random, *, is_chat: bool) -> dict[str, Any]:
    if rng.random() >= 0.25:
        return {}
    return {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
