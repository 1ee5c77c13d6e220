"""From a checked body to the generations it asks for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.base.errors import NotFound, RequestError
from router_svc.api.ids import Ids
from router_svc.api.openai.schema import ChatBody, CompletionBody, GenerationBody, Message
from router_svc.api.sampling import (
    MAX_SEQUENCES,
    Asked,
    check_token_ids,
    require_bounded,
    require_room,
    sampling_params,
    text_rules,
)
from router_svc.api.served_model import ServedModel
from router_svc.generation import Generation

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
#: OpenAI's default for completions.
DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One HTTP request that generates: `generations` are its prompts, in order."""

    response_id: str
    model: str
    created: int
    generations: tuple[Generation, ...]
    stream: bool
    include_usage: bool
    #: Usage in every chunk, not only in the last.
    continuous_usage: bool
    #: Completions only: the prompts' texts to begin the choices with, one per prompt.
    echoes: tuple[str, ...] = ()


def require_model(asked: str | None, model: ServedModel) -> None:
    """Raises `NotFound` for any other model than the one served."""
    if asked is not None and asked != model.name:
        raise NotFound(f"The model `{asked[:100]}` does not exist; this server has `{model.name}`.", param="model")


async def completion_job(body: CompletionBody, model: ServedModel, ids: Ids, max_model_len: int) -> Job:
    """Raises `RequestError`."""
    require_model(body.model, model)
    if len(body.prompt) * (body.n or 1) > MAX_SEQUENCES:
        # Before any text is tokenized.
        raise RequestError(
            f"{len(body.prompt)} prompts with n = {body.n or 1} are more than {MAX_SEQUENCES} sequences.", param="n"
        )
    prompts = await _token_ids(body, model)
    asked = Asked(max_tokens=body.max_tokens, default_max_tokens=DEFAULT_MAX_TOKENS, logprobs=body.logprobs)
    generations = _generations(body, asked, model, prompts, ids, max_model_len, COMPLETIONS)
    echoes = await _texts(body, model) if body.echo else []
    return _job(body, model, ids, generations, tuple(echoes))


async def chat_job(body: ChatBody, model: ServedModel, ids: Ids, max_model_len: int) -> Job:
    """Raises `RequestError`."""
    require_model(body.model, model)
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestError(
            "`max_tokens` and `max_completion_tokens` differ; give one of them.", param="max_completion_tokens"
        )
    prompt = await model.encode_chat(
        for_template(body.messages),
        add_generation_prompt=body.add_generation_prompt is not False,
        # The template writes the special tokens itself.
        add_special_tokens=bool(body.add_special_tokens),
        template_kwargs=body.chat_template_kwargs or {},
    )
    if not prompt:
        raise RequestError("`messages` have no tokens.", param="messages")
    asked = Asked(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        default_max_tokens=None,
        max_tokens_param="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    generations = _generations(body, asked, model, [prompt], ids, max_model_len, CHAT)
    return _job(body, model, ids, generations, ())


async def _token_ids(body: CompletionBody, model: ServedModel) -> list[list[int]]:
    token_ids = [prompt for prompt in body.prompt if isinstance(prompt, list)]
    if token_ids:
        for prompt in token_ids:
            check_token_ids(prompt, model.vocab_size, param="prompt")
        return token_ids
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    for text in texts:
        model.require_plausible(text, param="prompt")
    encoded = await model.encode(texts, add_special_tokens=body.add_special_tokens is not False)
    if not all(encoded):
        raise RequestError("`prompt` has no tokens.", param="prompt")
    return encoded


async def _texts(body: CompletionBody, model: ServedModel) -> list[str]:
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    return texts or await model.decode([prompt for prompt in body.prompt if isinstance(prompt, list)])


def for_template(messages: Sequence[Message]) -> list[dict[str, str]]:
    """What chat templates read."""
    return [message.for_template() for message in messages]


def _generations(
    body: GenerationBody,
    asked: Asked,
    model: ServedModel,
    prompts: Sequence[list[int]],
    ids: Ids,
    max_model_len: int,
    endpoint: str,
) -> tuple[Generation, ...]:
    param = "messages" if endpoint == CHAT else "prompt"
    generations = []
    for index, prompt in enumerate(prompts):
        require_room(len(prompt), max_model_len, param=param)
        sampling = sampling_params(body, asked, model, prompt_tokens=len(prompt), max_model_len=max_model_len)
        generations.append(
            Generation(
                request_id=ids.of_prompt(index),
                worker_request_id=ids.for_workers(index),
                prompt=tuple(prompt),
                sampling=sampling,
                text=text_rules(body),
                first_choice=index * sampling.n,
                endpoint=endpoint,
            )
        )
    require_bounded([generation.sampling for generation in generations])
    return tuple(generations)


def _job(
    body: GenerationBody,
    model: ServedModel,
    ids: Ids,
    generations: tuple[Generation, ...],
    echoes: tuple[str, ...],
) -> Job:
    options = body.stream_options
    return Job(
        response_id=ids.response,
        model=model.name,
        created=int(time.time()),
        generations=generations,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
        echoes=echoes,
    )
