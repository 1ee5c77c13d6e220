"""From a validated body to the generations it requests."""

from __future__ import annotations

import time
from dataclasses import dataclass

from pdserve.base.errors import RequestError, TooLarge
from router_svc.api.generations import (
    CHAT,
    COMPLETIONS,
    DEFAULT_MAX_TOKENS,
    GenerationFactory,
    require_model,
)
from router_svc.api.ids import Ids
from router_svc.api.openai.schema import ChatBody, CompletionBody, GenerationBody
from router_svc.api.sampling import MAX_SEQUENCES, EndpointFields
from router_svc.api.served_model import ServedModel
from router_svc.generation import Generation
from router_svc.records.resumable import ResponseShape, Resumable

#: Characters of prompts that the choices of one response repeat.
MAX_ECHO_CHARACTERS = 8 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One HTTP request that generates. `generations` are its prompts, in order."""

    response_id: str
    model: str
    created: int
    generations: tuple[Generation, ...]
    stream: bool
    include_usage: bool
    #: Whether every chunk has the usage so far, instead of only the last one.
    continuous_usage: bool
    #: The prompts' texts, with which choices start (completions with `echo` only).
    echoes: tuple[str, ...] = ()

    def shape(self, header_id: str) -> ResponseShape:
        """What another router needs to make the same response. One that is not streamed becomes a stream there."""
        return ResponseShape(
            response_id=self.response_id,
            header_id=header_id,
            model=self.model,
            created=self.created,
            include_usage=self.include_usage or not self.stream,
            continuous_usage=self.continuous_usage,
            echoes=self.echoes,
        )

    @classmethod
    def resumed(cls, resumable: Resumable) -> GenerationRequest:
        """The request that another router had."""
        shape = resumable.shape
        return cls(
            response_id=shape.response_id,
            model=shape.model,
            created=shape.created,
            generations=resumable.generations,
            stream=True,
            include_usage=shape.include_usage,
            continuous_usage=shape.continuous_usage,
            echoes=shape.echoes,
        )

    @property
    def num_choices(self) -> int:
        """Choices of the response, over all prompts."""
        return sum(generation.sampling.n for generation in self.generations)


async def completion_request(
    body: CompletionBody, model: ServedModel, ids: Ids, max_model_len: int
) -> GenerationRequest:
    """The generations of a completion. Raises `RequestError`."""
    require_model(body.model, model)
    if len(body.prompt) * (body.n or 1) > MAX_SEQUENCES:
        # Checked before any text is tokenized.
        raise RequestError(
            f"{len(body.prompt)} prompts with n = {body.n or 1} are more than {MAX_SEQUENCES} sequences. "
            "Split the request.",
            param="n",
        )
    prompts = await _token_ids(body, model, max_model_len)
    fields = EndpointFields(max_tokens=body.max_tokens, default_max_tokens=DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
    factory = GenerationFactory(
        model=model,
        max_model_len=max_model_len,
        ids=ids,
        endpoint=COMPLETIONS,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    generations = await factory.make(body, fields, prompts)
    echoes = await _echoes(body, model) if body.echo else []
    return _request(body, model, ids, generations, tuple(echoes))


async def chat_request(body: ChatBody, model: ServedModel, ids: Ids, max_model_len: int) -> GenerationRequest:
    """The generation of a chat. Raises `RequestError`."""
    require_model(body.model, model)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestError(
            "`max_tokens` and `max_completion_tokens` differ. Send only one of them.", param="max_completion_tokens"
        )
    prompt = await model.encode_chat(
        [message.for_template() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt is not False,
        # The template writes the special tokens itself.
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs or {},
    )
    if not prompt:
        raise RequestError("`messages` have no tokens. Send at least one message with content.", param="messages")
    fields = EndpointFields(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        default_max_tokens=None,
        max_tokens_param="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    factory = GenerationFactory(
        model=model,
        max_model_len=max_model_len,
        ids=ids,
        endpoint=CHAT,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    return _request(body, model, ids, await factory.make(body, fields, [prompt]), ())


async def _token_ids(body: CompletionBody, model: ServedModel, max_model_len: int) -> list[list[int]]:
    token_ids = [prompt for prompt in body.prompt if isinstance(prompt, list)]
    if token_ids:
        await model.check_prompts(token_ids, max_model_len)
        return token_ids
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    encoded = await model.encode(
        texts, add_special_tokens=body.add_special_tokens is not False, max_model_len=max_model_len
    )
    if not all(encoded):
        raise RequestError("`prompt` has no tokens. Send a text that is not empty.", param="prompt")
    return encoded


async def _echoes(body: CompletionBody, model: ServedModel) -> list[str]:
    """The texts of the prompts. Raises `TooLarge` if all choices together repeat too much of them."""
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    texts = texts or await model.decode([prompt for prompt in body.prompt if isinstance(prompt, list)])
    repeated = sum(map(len, texts)) * (body.n or 1)
    if repeated > MAX_ECHO_CHARACTERS:
        raise TooLarge(
            f"`echo` with n = {body.n or 1} repeats {repeated} characters of prompts (limit {MAX_ECHO_CHARACTERS}). "
            "Lower n, or leave echo out.",
            param="echo",
        )
    return texts


def _request(
    body: GenerationBody,
    model: ServedModel,
    ids: Ids,
    generations: tuple[Generation, ...],
    echoes: tuple[str, ...],
) -> GenerationRequest:
    options = body.stream_options
    return GenerationRequest(
        response_id=ids.response,
        model=model.name,
        created=int(time.time()),
        generations=generations,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
        echoes=echoes,
    )
