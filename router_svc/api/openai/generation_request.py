"""From a validated body to the generations it requests."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.base.errors import RequestError
from router_svc.api.generations import DEFAULT_MAX_TOKENS, GenerationFactory
from router_svc.api.openai.chat_grammar import chat_grammar
from router_svc.api.openai.chat_prompt import chat_prompt, chat_tool_use
from router_svc.api.openai.chat_reading import ChatReading, chat_reading, thinking_of
from router_svc.api.openai.echoes import echoes_of
from router_svc.api.openai.schema import ChatBody, CompletionBody, GenerationBody
from router_svc.api.openai.tools import ToolUse
from router_svc.api.prompt_tokens import require_few_token_ids, tokens_to_keep
from router_svc.api.request_template import with_template
from router_svc.api.sampling import MAX_SEQUENCES, EndpointFields
from router_svc.api.served_model import ServedModel
from router_svc.api.text_threads import INLINE_CHARACTERS
from router_svc.api.thinking_budget import thinking_budget
from router_svc.generation import Generation
from router_svc.messages.grammar import Calls, Thinking
from router_svc.messages.model_messages import kept_tokens
from router_svc.records.resumable import ResponseShape, Resumable


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
    #: How messages are read (chats only); None: as plain text.
    reading: ChatReading | None = None
    #: The prompts' texts, with which choices start (completions with `echo` only).
    echoes: tuple[str, ...] = ()
    #: Whether the response has the token ids of prompts and outputs.
    return_token_ids: bool = False
    #: What the response repeats of its request, as JSON, where the endpoint's does.
    request_fields: str = ""
    #: Whether the client gets the response's id at once, and comes back for the response.
    in_background: bool = False
    #: Whether another router had the request.
    is_resumed: bool = False
    #: Whether the form of its stream lets a client say how far it has come.
    can_be_resumed: bool = True
    #: Alternatives of prompt tokens in the echo, and in the field `prompt_logprobs`; None: no log-probabilities there.
    echo_logprobs: int | None = None
    prompt_logprobs: int | None = None

    def shape(self, header_id: str) -> ResponseShape:
        """What another router needs to make the same response. A response that is not streamed is a stream there."""
        return ResponseShape(
            response_id=self.response_id,
            header_id=header_id,
            model=self.model,
            created=self.created,
            include_usage=self.include_usage or not self.stream,
            continuous_usage=self.continuous_usage,
            echoes=self.echoes,
            reading="" if self.reading is None else self.reading.to_text(),
            return_token_ids=self.return_token_ids,
            request_fields=self.request_fields,
        )

    @classmethod
    def resumed(cls, resumable: Resumable, model: ServedModel) -> GenerationRequest:
        """The request that another router had. Raises `StaleError` if this router would answer it otherwise."""
        shape = resumable.shape
        return cls(
            response_id=shape.response_id,
            model=shape.model,
            created=shape.created,
            generations=resumable.generations,
            stream=True,
            is_resumed=True,
            include_usage=shape.include_usage,
            continuous_usage=shape.continuous_usage,
            echoes=shape.echoes,
            reading=ChatReading.from_text(shape.reading, model.messages.form) if shape.reading else None,
            return_token_ids=shape.return_token_ids,
            request_fields=shape.request_fields,
        )

    @property
    def num_choices(self) -> int:
        """Choices of the response, over all prompts."""
        return sum(generation.sampling.n for generation in self.generations)

    @property
    def scores_prompts(self) -> bool:
        """Whether the response has log-probabilities of prompts."""
        return self.generations[0].prompt_logprobs is not None

    @property
    def prompts_of_choices(self) -> list[Sequence[int]]:
        """The token ids of each choice's prompt; empty if the client did not request them."""
        if not self.return_token_ids:
            return []
        return [generation.prompt for generation in self.generations for _ in range(generation.sampling.n)]


async def completion_request(
    body: CompletionBody, factory: GenerationFactory, *, default_max_tokens: int | None = DEFAULT_MAX_TOKENS
) -> GenerationRequest:
    """The generations of a completion. Raises `RequestError`.

    `default_max_tokens`: how many tokens it may have without `max_tokens`; None: the rest of the context.
    """
    model = factory.model
    # Before any text is tokenized.
    _require_few_sequences(len(body.prompt), body.n or 1)
    output_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    keep = tokens_to_keep(body.truncate_prompt_tokens, output_tokens, factory.max_model_len)
    prompts = await _token_ids(body, model, factory.max_model_len, keep)
    echo_logprobs = body.logprobs if body.echo else None
    fields = EndpointFields(
        max_tokens=body.max_tokens,
        default_max_tokens=default_max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max((k for k in (echo_logprobs, body.prompt_logprobs) if k is not None), default=None),
        grammar=await model.grammar_of(body),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=await model.bad_words(body.bad_words or ()),
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )
    generations = await factory.make(body, fields, prompts)
    echoes, generations = await echoes_of(body, model, generations, is_truncated=keep is not None)
    return replace(_request(body, factory, generations, echoes), echo_logprobs=echo_logprobs)


def _require_few_sequences(num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_SEQUENCES:
        raise RequestError(
            f"{num_prompts} prompts with n = {n} are more than {MAX_SEQUENCES} sequences. Split the request.",
            param="n",
        )


async def chat_request(
    body: ChatBody, factory: GenerationFactory, *, default_max_tokens: int | None = None
) -> GenerationRequest:
    """The generation of a chat. Raises `RequestError`.

    `default_max_tokens`: how many tokens it may have without `max_tokens`, or fewer if the context ends before.
    """
    model = factory.model
    if body.chat_template is not None:
        model = await with_template(model, body.chat_template)
    use = chat_tool_use(body, model)
    keep = tokens_to_keep(body.truncate_prompt_tokens, _chat_max_tokens(body) or 1, factory.max_model_len)
    prompt = await chat_prompt(body, model, use, keep)
    reading = _reading(body, model, use, prompt)
    fields = await _chat_fields(body, model, use, reading)
    fields = replace(fields, default_max_tokens=default_max_tokens)
    generations = await replace(factory, model=model).make(body, fields, [prompt])
    return replace(_request(body, factory, generations, ()), reading=reading)


async def _chat_fields(body: ChatBody, model: ServedModel, use: ToolUse, reading: ChatReading | None) -> EndpointFields:
    """The fields of a chat. Raises `RequestError`."""
    grammar = await _chat_grammar(body, model, use, reading)
    budget = None
    if body.thinking_token_budget is not None:
        thinking = Thinking.NONE if reading is None else thinking_of(reading)
        budget = await thinking_budget(model, body.thinking_token_budget, thinking, has_grammar=bool(grammar))
    return EndpointFields(
        max_tokens=_chat_max_tokens(body),
        default_max_tokens=None,
        max_tokens_param="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
        kept_tokens=() if reading is None else kept_tokens(reading.form, model.tokenizer),
        continues_text=bool(body.continue_final_message),
        allowed_token_ids=tuple(body.allowed_token_ids or ()),
        bad_words=await model.bad_words(body.bad_words or ()),
        thinking=budget,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
    )


def _chat_max_tokens(body: ChatBody) -> int | None:
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise RequestError(
            "`max_tokens` and `max_completion_tokens` differ. Send only one of them.", param="max_completion_tokens"
        )
    return body.max_completion_tokens or body.max_tokens


def _reading(body: ChatBody, model: ServedModel, use: ToolUse, prompt: list[int]) -> ChatReading | None:
    """How the answers are read. Raises `RequestError` if they would start within a call."""
    reading = chat_reading(model, use, prompt, shows_thinking=body.include_reasoning is not False)
    if body.continue_final_message and reading is not None and reading.parser().starts_in_call:
        raise RequestError(
            "`continue_final_message` cannot go on within a call. End the message before it.",
            param="continue_final_message",
        )
    return reading


async def _chat_grammar(body: ChatBody, model: ServedModel, use: ToolUse, reading: ChatReading | None) -> str:
    """What the answer has to match; empty: anything. Raises `RequestError`."""
    text = await model.grammar_of(body)
    if reading is None and use.calls is Calls.REQUIRED:
        raise RequestError(
            "`tool_choice` requires calls, but this router takes messages for plain text (--message-format none).",
            param="tool_choice",
        )
    if reading is None or not (use.tools or text):
        return text
    special_tokens, thinking = model.tokenizer.special_tokens, thinking_of(reading)

    def find() -> str:
        key = hashlib.sha256(repr((use, thinking, text)).encode(errors="surrogatepass")).digest()
        return model.grammars.get(key, lambda: chat_grammar(reading.form, use, thinking, text, special_tokens))

    # Never on the event loop: tools can take long to check.
    return await model.threads.run(INLINE_CHARACTERS + 1, find)


async def _token_ids(body: CompletionBody, model: ServedModel, max_model_len: int, keep: int | None) -> list[list[int]]:
    token_ids = [prompt if keep is None else prompt[-keep:] for prompt in body.prompt if isinstance(prompt, list)]
    if token_ids:
        await model.check_prompts(token_ids, max_model_len)
        return token_ids
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    encoded = await model.encode(
        texts, add_special_tokens=body.add_special_tokens is not False, max_model_len=max_model_len, keep=keep
    )
    if not all(encoded):
        raise RequestError("`prompt` has no tokens. Send a text that is not empty.", param="prompt")
    return encoded


def _request(
    body: GenerationBody, factory: GenerationFactory, generations: tuple[Generation, ...], echoes: tuple[str, ...]
) -> GenerationRequest:
    options = body.stream_options
    if body.return_token_ids:
        require_few_token_ids(sum(len(each.prompt) * each.sampling.n for each in generations))
    return GenerationRequest(
        response_id=factory.ids.response,
        model=factory.model.name,
        created=int(time.time()),
        generations=generations,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
        echoes=echoes,
        return_token_ids=bool(body.return_token_ids),
        prompt_logprobs=body.prompt_logprobs,
    )
