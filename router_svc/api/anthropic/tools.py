"""Tools in the request of a message, and their form in chats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from annotated_types import MaxLen
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from router_svc.api.lenient import LenientModel, by_field, tagged
from router_svc.api.openai import tools as chat
from router_svc.api.openai.tools import MAX_TOOLS, ToolName


class ClientTool(LenientModel):
    """A tool of the client. Those that run on the server are none of this one's."""

    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: Any = None


class AutoToolChoice(LenientModel):
    """The model decides."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyToolChoice(LenientModel):
    """The answer has to call one of the tools."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(LenientModel):
    """The tool that the answer has to call."""

    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(LenientModel):
    """The answer calls nothing."""

    type: Literal["none"]


def _own_tool(value: object) -> object:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind is None or kind == "custom":
        return value
    raise PydanticCustomError(
        "type", "is a tool of another server. Only those of the client, of the type custom, are known"
    )


ToolChoice = Annotated[
    Annotated[AutoToolChoice, tagged("auto")]
    | Annotated[AnyToolChoice, tagged("any")]
    | Annotated[NamedToolChoice, tagged("tool")]
    | Annotated[NoToolChoice, tagged("none")],
    by_field("type", "must have the type auto, any, tool or none"),
]
Tools = Annotated[list[Annotated[ClientTool, BeforeValidator(_own_tool)]], MaxLen(MAX_TOOLS), Field(fail_fast=True)]


def chat_tools(tools: Sequence[ClientTool]) -> list[chat.Tool]:
    """The tools as chats have them."""
    functions = [
        chat.Function.model_construct(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
        )
        for tool in tools
    ]
    return [chat.Tool.model_construct(type="function", function=function) for function in functions]


def chat_tool_choice(choice: ToolChoice | None) -> chat.ToolChoice | None:
    """The choice as chats have it."""
    match choice:
        case None:
            return None
        case NamedToolChoice(name=name):
            return chat.NamedTool(type="function", function=chat.FunctionName(name=name))
        case _:
            return choice.type


def allows_parallel(choice: ToolChoice | None) -> bool:
    """Whether the answer may have several calls."""
    return isinstance(choice, NoToolChoice | None) or not choice.disable_parallel_tool_use
