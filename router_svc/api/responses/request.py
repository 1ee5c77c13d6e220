"""From a validated body to the chat that answers it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pdserve.base.errors import RequestError
from router_svc.api.generations import GenerationFactory
from router_svc.api.openai.generation_request import GenerationRequest, chat_request
from router_svc.api.openai.schema import ChatBody
from router_svc.api.parse import validate
from router_svc.api.responses.conversation import chat_messages
from router_svc.api.responses.items import Item, ItemReference
from router_svc.api.responses.schema import ENCRYPTED_CONTENT, ResponsesBody, SchemaFormat
from router_svc.api.responses.tools import AllowedChoice, NamedChoice, Names, chat_tools, name_for_model
from router_svc.api.responses.truncation import fitted
from router_svc.api.text_threads import INLINE_CHARACTERS

#: Fields with the same name and meaning in a chat.
_SAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "chat_template_kwargs", "cache_salt", "priority", "timeout", "stream"),
    *("parallel_tool_calls", "thinking_token_budget"),
)
#: What a field of the chat is called here, for errors. The first that fits counts.
_OWN_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_TOOL = re.compile(r"\btools\[([0-9]+)\]\.function\b")
#: Fields that the response repeats as they were sent.
_REPEATED = ("instructions", "metadata", "user", "safety_identifier", "prompt_cache_key", "max_output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is stored of a request with its response."""

    tenant: str
    key_id: str
    #: The conversation with all before it, as JSON objects.
    items: list[Any]
    #: Where the items of this request start.
    first_own_item: int


async def responses_request(
    body: ResponsesBody, factory: GenerationFactory, kept: Kept | None = None
) -> GenerationRequest:
    """The generation of a response. `kept`: what is stored with it; None: it is not stored.

    Raises `RequestError`, by the names of the fields of this endpoint.
    """
    _require_no_references(body)
    threads = factory.model.threads
    tools, names = chat_tools(body.tools or ())

    async def of_items(items: Sequence[Item]) -> GenerationRequest:
        # Conversations and tools can be long.
        chat = await threads.run(INLINE_CHARACTERS + 1, lambda: validate(ChatBody, _chat_fields(body, items, tools)))
        return await chat_request(chat, factory)

    try:
        generation = await (fitted(body.input, of_items) if body.truncation == "auto" else of_items(body.input))
    except RequestError as error:
        raise _with_own_names(error, names) from error
    fields = await threads.run(
        INLINE_CHARACTERS + 1, lambda: json.dumps(_request_fields(body, names, generation, kept), ensure_ascii=False)
    )
    return replace(generation, request_fields=fields, in_background=bool(body.background))


def _require_no_references(body: ResponsesBody) -> None:
    index = next((index for index, item in enumerate(body.input) if isinstance(item, ItemReference)), None)
    if index is not None:
        raise RequestError(
            f"`input[{index}]` refers to an item of a stored response, and this server stores none, or none for "
            "batches. Send the item itself.",
            param="input",
        )


def _chat_fields(body: ResponsesBody, items: Sequence[Item], tools: list[dict[str, Any]]) -> dict[str, Any]:
    fields = {name: getattr(body, name) for name in _SAME}
    fields["messages"] = chat_messages(body.instructions, items)
    if not fields["messages"]:
        raise RequestError(
            "`input` has only items that this server leaves out. Send a message, too, or `instructions`.", param="input"
        )
    fields["max_completion_tokens"] = body.max_output_tokens
    fields["tools"] = tools or None
    fields["tool_choice"] = _tool_choice(body) if tools else None
    if not tools and isinstance(body.tool_choice, NamedChoice | AllowedChoice):
        raise RequestError("`tool_choice` names a tool that `tools` lacks.", param="tool_choice")
    if body.reasoning is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.includes_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _response_format(body.text.format)
    return {name: value for name, value in fields.items() if value is not None}


def _response_format(given: Any) -> dict[str, Any]:
    if isinstance(given, SchemaFormat):
        return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema_}}
    return {"type": given.type}


def _tool_choice(body: ResponsesBody) -> object:
    match body.tool_choice:
        case NamedChoice() as named:
            return _named(named)
        case AllowedChoice() as allowed:
            tools = [_named(each) for each in allowed.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": allowed.mode, "tools": tools}}
        case choice:
            return choice


def _named(choice: NamedChoice) -> dict[str, Any]:
    name = name_for_model(choice.name, choice.namespace, param="tool_choice")
    return {"type": "function", "function": {"name": name}}


def _request_fields(
    body: ResponsesBody, names: Names, generation: GenerationRequest, kept: Kept | None
) -> Mapping[str, Any]:
    """What the response repeats, and what its items are made with."""
    sampling = generation.generations[0].sampling
    text_format = {"type": "text"} if body.text is None or body.text.format is None else _shown(body.text.format)
    choice = body.tool_choice or "auto"
    return {
        "repeated": {
            **{name: getattr(body, name) for name in _REPEATED},
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(exclude_none=True),
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "text": {"format": text_format},
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "top_logprobs": body.top_logprobs or 0,
            "truncation": body.truncation or "disabled",
            "store": kept is not None,
            "background": bool(body.background),
            "previous_response_id": body.previous_response_id,
        },
        # The record of a background response has it already. It is kept as text, since it is only read at the end.
        "kept": None if kept is None or body.background else json.dumps(asdict(kept), ensure_ascii=False),
        "names": names.to_record(),
        "encodes_thinking": ENCRYPTED_CONTENT in (body.include or ()),
        "has_logprobs": body.includes_logprobs,
    }


def _shown(given: Any) -> dict[str, Any]:
    if isinstance(given, SchemaFormat):
        return {"description": None, "strict": None} | given.model_dump(by_alias=True)
    return {"type": given.type}


def _with_own_names(error: RequestError, names: Names) -> RequestError:
    """The same error, by the names that the client knows."""

    def own(text: str) -> str:
        return _TOOL.sub(lambda match: names.paths[int(match[1])], text)

    param, text = error.param and own(error.param), own(str(error))
    for chat_name, name in _OWN_NAMES.items():
        text = text.replace(f"`{chat_name}", f"`{name}")
        if param is not None and (param == chat_name or param.startswith((f"{chat_name}.", f"{chat_name}["))):
            # Messages are those of several items, and have their own numbers.
            param = name if name == "input" else name + param.removeprefix(chat_name)
    return type(error)(text, param=param)
