"""From the messages of Ollama's API to those that chat templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from router_svc.api.body import MAX_NAME_CHARACTERS
from router_svc.api.json_pieces import to_json
from router_svc.api.lenient import LenientModel
from router_svc.api.openai.messages import MAX_CALLS, MAX_MESSAGES, ChatMessage
from router_svc.api.openai.read_message import call_digest
from router_svc.api.openai.tools import MAX_TOOLS, CalledFunction, Function, Tool, ToolCall, ToolName

#: Characters of a call's id. Some templates want ids of this length.
_ID_CHARACTERS = 9
_Name = Annotated[str, MaxLen(MAX_NAME_CHARACTERS)]


def _no_images(value: object) -> object:
    if value is None or value == []:
        return None
    raise PydanticCustomError("images", "must be empty: models here read text. Leave images out")


NoImages = Annotated[
    None,
    BeforeValidator(_no_images),
    WithJsonSchema({"enum": [None, []]}),
    Field(description="Not supported: models here read text."),
]


class OllamaCalledFunction(LenientModel):
    """A call in an earlier message."""

    name: ToolName
    arguments: Annotated[dict[str, Any], Field(description="The arguments of the call.")]
    index: int | None = None


class OllamaToolCall(LenientModel):
    """A call in an earlier message, as an answer had it."""

    function: OllamaCalledFunction
    id: _Name | None = None


class OllamaMessage(LenientModel):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: NoImages = None
    tool_calls: Annotated[list[OllamaToolCall], MaxLen(MAX_CALLS)] | None = None
    tool_name: _Name | None = None
    tool_call_id: _Name | None = None


class OllamaFunction(LenientModel):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(LenientModel):
    """A tool. Only functions are known."""

    type: Literal["function"] | None = None
    function: OllamaFunction


OllamaMessages = Annotated[list[OllamaMessage], MinLen(1), MaxLen(MAX_MESSAGES), Field(fail_fast=True)]
OllamaTools = Annotated[list[OllamaTool], MaxLen(MAX_TOOLS)]


def chat_tools(tools: Sequence[OllamaTool]) -> list[Tool]:
    """The tools as chats have them."""
    functions = [
        Function.model_construct(
            name=tool.function.name, description=tool.function.description, parameters=tool.function.parameters
        )
        for tool in tools
    ]
    return [Tool.model_construct(type="function", function=function) for function in functions]


def chat_messages(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """The messages as chats have them.

    Clients of this API send no ids of calls, while some templates need them: calls are numbered, and a result is that
    of the first call before it which has its name, or any name, and no result.
    """
    converted: list[ChatMessage] = []
    count, waiting = 0, list[ToolCall]()
    for message in messages:
        calls = [_call(call, count + index) for index, call in enumerate(message.tool_calls or ())]
        if calls:
            count += len(calls)
            waiting = [*calls]
        answered = message.tool_call_id
        if message.role == "tool" and answered is None:
            answered = _answered(waiting, message.tool_name)
        converted.append(
            ChatMessage.model_construct(
                role=message.role,
                content=message.content or ("" if message.role != "assistant" else None),
                name=message.tool_name,
                tool_call_id=answered,
                tool_calls=calls or None,
                reasoning=message.thinking,
            )
        )
    return converted


def continues(messages: Sequence[OllamaMessage]) -> bool:
    """Whether the answer goes on with the last message."""
    last = messages[-1]
    return last.role == "assistant" and not last.tool_calls and bool((last.content or "").strip())


def _call(call: OllamaToolCall, number: int) -> ToolCall:
    function = CalledFunction.model_construct(
        name=call.function.name, arguments=to_json(call.function.arguments).decode()
    )
    own_id = call.id or call_digest("", 0, number)[:_ID_CHARACTERS]
    return ToolCall.model_construct(id=own_id, type="function", function=function)


def _answered(waiting: list[ToolCall], name: str | None) -> str | None:
    """The id of the call that a result of this name belongs to, which then waits no more."""
    for index, call in enumerate(waiting):
        if name is None or call.function.name == name:
            del waiting[index]
            return call.id
    return None
