"""The tools of a request: functions, custom tools whose input is text, and namespaces of both.

Models know functions only. A custom tool is shown to them as a function with one text, and a tool in a namespace under
a name with both. The way back is `Names`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

from pdserve.base.errors import RequestError
from router_svc.api.lenient import TEXT, by_field, tagged
from router_svc.api.openai.tools import MAX_TOOL_NAME, MAX_TOOLS, ToolName
from router_svc.api.responses.items import LenientModel, other_than, read_one

#: The argument that is the input of a custom tool.
INPUT = "input"
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


class FunctionTool(LenientModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    #: A JSON schema of an object; absent: an object without properties.
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomTool(LenientModel):
    """A tool whose input is a text of any form."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    #: What the input looks like. It is described to the model and not enforced.
    format: dict[str, Any] | None = None


def _members(value: object) -> list[FunctionTool | CustomTool]:
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_TOOLS:
        raise PydanticCustomError("tools", "must be a list of 1 to {limit} tools", {"limit": MAX_TOOLS})
    return [
        read_one(CustomTool, each, index) if _kind(each) == "custom" else read_one(FunctionTool, each, index)
        for index, each in enumerate(value)
    ]


def _kind(value: object) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


class Namespace(LenientModel):
    """Tools with a name in common."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[
        list[FunctionTool | CustomTool],
        PlainValidator(
            _members,
            json_schema_input_type=Annotated[list[FunctionTool | CustomTool], MinLen(1), MaxLen(MAX_TOOLS)],
        ),
    ]


class HostedTool(LenientModel):
    """A tool that OpenAI's servers run. This one has none: it is left out."""

    type: Annotated[str, MaxLen(64), other_than(("function", "custom", "namespace"))]


class NamedChoice(LenientModel):
    """The tool that the response has to call."""

    type: Literal["function", "custom"]
    name: ToolName
    namespace: ToolName | None = None


class AllowedChoice(LenientModel):
    """The tools that the response may call, or has to call one of."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedChoice], MinLen(1), MaxLen(MAX_TOOLS)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], tagged(TEXT)]
    | Annotated[NamedChoice, tagged("function")]
    | Annotated[NamedChoice, tagged("custom")]
    | Annotated[AllowedChoice, tagged("allowed_tools")],
    by_field("type", "must be none, auto or required, or have the type function, custom or allowed_tools"),
]
Tool = FunctionTool | CustomTool | Namespace | HostedTool
_KINDS: Mapping[str | None, type[Tool]] = {"function": FunctionTool, "custom": CustomTool, "namespace": Namespace}


def _tools(value: object) -> list[Tool]:
    if not isinstance(value, list) or len(value) > MAX_TOOLS:
        raise PydanticCustomError("tools", "must be a list of at most {limit} tools", {"limit": MAX_TOOLS})
    return [read_one(_KINDS.get(_kind(each), HostedTool), each, index) for index, each in enumerate(value)]


Tools = Annotated[list[Tool], PlainValidator(_tools, json_schema_input_type=Annotated[list[Tool], MaxLen(MAX_TOOLS)])]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledTool:
    """What a name that the model has called stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class Names:
    """The tools of a request by the names that the model knows."""

    tools: Mapping[str, CalledTool]
    #: Where each tool of the chat is in the request, as `tools[1].tools[0]`, for errors.
    paths: Sequence[str] = ()

    def of(self, name: str) -> CalledTool:
        """The tool of this name."""
        return self.tools.get(name) or CalledTool(name=name)

    def to_record(self) -> dict[str, list[Any]]:
        """What is not said by the names themselves, as JSON."""
        return {
            name: [tool.name, tool.namespace, tool.is_custom]
            for name, tool in self.tools.items()
            if tool != CalledTool(name=name)
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Sequence[Any]]) -> Names:
        """The names of such a record."""
        return cls(
            {
                name: CalledTool(name=own, namespace=namespace, is_custom=is_custom)
                for name, (own, namespace, is_custom) in record.items()
            }
        )


def name_for_model(name: str, namespace: str | None, *, param: str) -> str:
    """The name under which a model knows a tool. Raises `RequestError` if it is too long with its namespace."""
    if not namespace:
        return name
    if len(joined := f"{namespace}.{name}") > MAX_TOOL_NAME:
        raise RequestError(
            f"`{param}` has the tool `{name}` in a namespace, and both names have {len(joined)} characters "
            f"with the dot between them (limit {MAX_TOOL_NAME}). Shorten one of them.",
            param=param,
        )
    return joined


def chat_tools(tools: Sequence[Tool]) -> tuple[list[dict[str, Any]], Names]:
    """The tools as those of a chat, and what their names stand for. What is not known is left out."""
    shown, names, paths = list[dict[str, Any]](), dict[str, CalledTool](), list[str]()
    for path, tool, namespace in _flat(tools):
        paths.append(path)
        name = name_for_model(tool.name, namespace, param="tools")
        function: dict[str, Any] = {"name": name, "description": _description(tool)}
        if isinstance(tool, CustomTool):
            function["parameters"] = _INPUT_SCHEMA
        else:
            function |= {"parameters": tool.parameters, "strict": tool.strict}
        given = {key: value for key, value in function.items() if value is not None}
        shown.append({"type": "function", "function": given})
        names[name] = CalledTool(name=tool.name, namespace=namespace, is_custom=isinstance(tool, CustomTool))
    return shown, Names(names, paths)


def left_out(tools: Sequence[Tool]) -> list[str]:
    """The types of tools that this server does not have."""
    return [tool.type for tool in tools if isinstance(tool, HostedTool)]


def _flat(tools: Sequence[Tool]) -> Iterator[tuple[str, FunctionTool | CustomTool, str | None]]:
    """Path in the request, tool and namespace."""
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        match tool:
            case FunctionTool() | CustomTool():
                yield path, tool, None
            case Namespace():
                yield from ((f"{path}.tools[{member}]", each, tool.name) for member, each in enumerate(tool.tools))


def _description(tool: FunctionTool | CustomTool) -> str | None:
    """The description. For a custom tool, it includes the form of the input."""
    if not isinstance(tool, CustomTool) or not tool.format or tool.format.get("type") != "grammar":
        return tool.description
    definition = tool.format.get("definition")
    text = definition if isinstance(definition, str) else json.dumps(definition)
    syntax = tool.format.get("syntax", "")
    return f"{tool.description or ''}\n\nThe input matches this {syntax} grammar:\n{text}".strip()
