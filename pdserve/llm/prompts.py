"""What is sent: prompts and conversations, as the bodies of requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar, cast

from pdserve.llm.sampling_params import SamplingParams


class TextPrompt(TypedDict, total=False):
    """A prompt as text, tokenized by the server."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids."""

    prompt_token_ids: list[int]
    cache_salt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt
Message = Mapping[str, Any]
Params = TypeVar("Params")
_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class ChatOptions(TypedDict, total=False):
    """Options of `chat`, with the defaults of the HTTP API."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    parallel_tool_calls: bool | None
    documents: list[dict[str, Any]] | None
    reasoning_effort: str | None
    include_reasoning: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt to continue: a text or token ids."""

    text: str | None = None
    token_ids: Sequence[int] | None = None
    cache_salt: str | None = None
    path = "/v1/completions"

    def fields(self, params: SamplingParams) -> dict[str, Any]:
        """The fields of a completion request that are this prompt's. Raises `ValueError`."""
        if params.thinking_token_budget is not None:
            raise ValueError("`thinking_token_budget` bounds the thinking of messages. Use `chat`.")
        fields: dict[str, Any] = {"prompt": self.text if self.token_ids is None else list(self.token_ids)}
        if self.cache_salt is not None:
            fields["cache_salt"] = self.cache_salt
        if params.logprobs is not None:
            fields["logprobs"] = params.logprobs
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages to answer."""

    messages: Sequence[Message]
    options: ChatOptions = field(default_factory=ChatOptions)
    path = "/v1/chat/completions"
    text = None

    def fields(self, params: SamplingParams) -> dict[str, Any]:
        """The fields of a chat request that are this conversation's."""
        fields: dict[str, Any] = {"messages": list(self.messages)}
        fields |= {name: value for name, value in self.options.items() if value is not None}
        if params.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": params.logprobs}
        if params.thinking_token_budget is not None:
            fields["thinking_token_budget"] = params.thinking_token_budget
        return fields


def to_prompt(given: PromptType) -> Prompt:
    """The prompt in any of its forms. Raises `ValueError`."""
    if isinstance(given, str):
        return Prompt(text=given)
    if isinstance(given, Mapping):
        unknown = sorted(given.keys() - _KEYS)
        if unknown:
            raise ValueError(f"A prompt has the key {unknown[0]!r}. Known keys: {', '.join(sorted(_KEYS))}.")
        if ("prompt" in given) == ("prompt_token_ids" in given):
            raise ValueError("A prompt that is a dict needs either `prompt` or `prompt_token_ids`.")
        fields: Mapping[str, Any] = given
        return Prompt(
            text=fields.get("prompt"), token_ids=fields.get("prompt_token_ids"), cache_salt=fields.get("cache_salt")
        )
    if _is_token_ids(given):
        return Prompt(token_ids=given)
    raise ValueError(f"A prompt is a text, token ids, or a dict with one of them, but not {type(given).__name__}.")


def to_prompts(given: PromptType | Sequence[PromptType]) -> list[Prompt]:
    """One prompt or several as a list. Raises `ValueError`, with the index of a wrong one."""
    if isinstance(given, str | Mapping) or _is_token_ids(given):
        return [to_prompt(given)]  # type: ignore[arg-type]
    prompts = []
    for index, prompt in enumerate(given):
        try:
            prompts.append(to_prompt(prompt))  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"Prompt {index}: {error}") from None
    return prompts


def to_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]], options: ChatOptions
) -> list[Conversation]:
    """One conversation or several as a list. Raises `ValueError` or `TypeError`."""
    unknown = sorted(options.keys() - ChatOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(ChatOptions.__annotations__)
        raise TypeError(f"chat() has no argument {unknown[0]!r}. Its options: {known}.")
    several = messages if messages and not isinstance(messages[0], Mapping) else [messages]
    return [Conversation(messages=each, options=options) for each in several]  # type: ignore[arg-type]


def to_each(params: Params | Sequence[Params], kind: type[Params], count: int) -> list[Params]:
    """The parameters of each of `count` prompts. Raises `ValueError` unless there is one of them or as many."""
    if isinstance(params, kind):
        return [params] * count
    several = cast(Sequence[Params], params)
    if len(several) != count:
        raise ValueError(f"There are {count} prompts and {len(several)} {kind.__name__}. Give one, or one per prompt.")
    return list(several)


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
