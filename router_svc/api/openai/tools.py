"""Tools in the request of a chat: their fields, named as by OpenAI, and which of them the answer may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import StringConstraints

from pdserve.base.errors import RequestError
from router_svc.api.body import StrictModel
from router_svc.api.json_keywords import reference_steps, target_of
from router_svc.api.lenient import TEXT, by_field, tagged
from router_svc.api.parse import read_object
from router_svc.messages.calls import ToolTypes
from router_svc.messages.grammar import Calls

MAX_TOOLS = 256
#: Schemas of a request that are looked at to find types: some milliseconds.
_MAX_LOOKS = 10_000
#: Characters of a tool's name, as many as in MCP.
MAX_TOOL_NAME = 128
ToolName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
_CallId = Annotated[str, MaxLen(256)]


class Function(StrictModel):
    """A function that the model may call."""

    name: ToolName
    description: str | None = None
    #: A JSON schema of an object; absent: an object without properties.
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool. Only functions are known."""

    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    """A function by its name."""

    name: ToolName


class NamedTool(StrictModel):
    """The function that the answer has to call."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(StrictModel):
    """The functions that the answer may call, or has to call one of."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], MinLen(1), MaxLen(MAX_TOOLS)]


class AllowedToolsChoice(StrictModel):
    """OpenAI's form of a choice among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


#: "any" is LangChain's name of "required".
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required", "any"], tagged(TEXT)]
    | Annotated[NamedTool, tagged("function")]
    | Annotated[AllowedToolsChoice, tagged("allowed_tools")],
    by_field("type", "must be none, auto or required, or have the type function or allowed_tools"),
]
Tools = Annotated[list[Tool], MaxLen(MAX_TOOLS)]


class CalledFunction(StrictModel):
    """A call in an earlier message."""

    name: ToolName
    #: JSON as text.
    arguments: str


class ToolCall(StrictModel):
    """A call in an earlier message, as an answer had it."""

    id: _CallId | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates read it: arguments are an object if they are one. Takes long if they are."""
        arguments = read_object(self.function.arguments or "{}")
        function = {
            "name": self.function.name,
            "arguments": self.function.arguments if arguments is None else arguments,
        }
        return {"type": "function", "function": function} | ({"id": self.id} if self.id else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """Which tools an answer may call."""

    tools: Sequence[Function] = ()
    calls: Calls = Calls.NONE
    #: Indices of the tools that may be called.
    callable: Sequence[int] = ()
    #: The client has named the function, so calls are the regular end of the answer.
    is_named: bool = False
    is_parallel: bool = True

    @property
    def for_template(self) -> list[dict[str, Any]]:
        """The tools as chat templates read them."""
        return [{"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in self.tools]

    @property
    def names(self) -> list[str]:
        """The names of the tools that may be called."""
        return [self.tools[index].name for index in self.callable]

    def types(self) -> ToolTypes:
        """The types of the callable tools' parameters."""
        types = TypeFinder()
        return {self.tools[i].name: types.of_properties(self.tools[i].parameters or {}) for i in self.callable}


def tool_use(tools: Sequence[Tool], choice: ToolChoice | None, *, is_parallel: bool) -> ToolUse:
    """What the fields mean. Raises `RequestError` for a choice among tools that are not there."""
    functions = [tool.function for tool in tools]
    indices = {function.name: index for index, function in enumerate(functions)}
    if len(indices) < len(functions):
        raise RequestError("Two functions in `tools` have the same name.", param="tools")
    if not functions and choice not in (None, "none", "auto"):
        raise RequestError("`tool_choice` needs `tools`.", param="tool_choice")
    calls, names = _chosen(choice, list(indices))
    unknown = next((name for name in names if name not in indices), None)
    if unknown is not None:
        raise RequestError(f"`tool_choice` names the function `{unknown}`, which `tools` lacks.", param="tool_choice")
    return ToolUse(
        tools=functions,
        calls=calls if functions else Calls.NONE,
        callable=[indices[name] for name in names],
        is_named=isinstance(choice, NamedTool),
        is_parallel=is_parallel and not isinstance(choice, NamedTool),
    )


def _chosen(choice: ToolChoice | None, names: list[str]) -> tuple[Calls, list[str]]:
    match choice:
        case None | "auto":
            return Calls.AUTO, names
        case "none":
            return Calls.NONE, []
        case NamedTool(function=function):
            return Calls.REQUIRED, [function.name]
        case AllowedToolsChoice(allowed_tools=allowed):
            calls = Calls.AUTO if allowed.mode == "auto" else Calls.REQUIRED
            return calls, list(dict.fromkeys(each.function.name for each in allowed.tools))
        case _:
            return Calls.REQUIRED, names


class TypeFinder:
    """Finds the types that values may have.

    Looks at a bounded number of schemas, of all tools together: options and references multiply each other.
    """

    def __init__(self) -> None:
        self._left = _MAX_LOOKS

    def of_properties(self, schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
        """The types of each property of an object."""
        properties = schema.get("properties")
        if not isinstance(properties, dict):
            return {}
        return {name: self.of(each, schema) for name, each in properties.items()}

    def of(self, schema: object, root: Mapping[str, Any]) -> frozenset[str]:
        """The types of a value; none: any, or too much to look at. `root`: where references lead."""
        found, seen = set[str](), set[int]()
        waiting = [schema]
        while waiting:
            each = waiting.pop()
            if not isinstance(each, dict) or id(each) in seen:
                continue
            if not self._left:
                return frozenset()
            self._left -= 1
            seen.add(id(each))
            if (steps := reference_steps(each.get("$ref"))) is not None:
                waiting.append(target_of(root, steps))
                continue
            found |= _own_types(each)
            for keyword in ("anyOf", "oneOf"):
                waiting += _list(each.get(keyword))
        return frozenset(found)


def _own_types(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    found = {each for each in (declared if isinstance(declared, list) else [declared]) if isinstance(each, str)}
    if not found and "enum" in schema and all(isinstance(each, str) for each in _list(schema["enum"])):
        return {"string"}
    return found


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
