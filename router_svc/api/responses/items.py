"""The items of a conversation in a request: messages, calls with their outputs, and thinking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar

from annotated_types import MaxLen, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainValidator, ValidationError, WithJsonSchema
from pydantic_core import PydanticCustomError

from router_svc.api.openai.messages import MAX_MESSAGES
from router_svc.api.openai.tools import ToolName
from router_svc.api.parse import LIST_ENTRY, location

Id = Annotated[str, MaxLen(256)]


def other_than(names: Sequence[str]) -> WithJsonSchema:
    """The schema of a `type` that is none of `names`."""
    return WithJsonSchema({"type": "string", "maxLength": 64, "not": {"enum": [*names]}})


class LenientModel(BaseModel):
    """An object within a body. What is unknown in it is ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class TextContent(LenientModel):
    """Text of a message, of thinking or of what a call has returned."""

    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str


class Refusal(LenientModel):
    """What the model has said instead of an answer."""

    type: Literal["refusal"]
    refusal: str


def _text_of(value: object) -> object:
    """Content given as a list, as one text. Raises an error for content that is no text."""
    return "\n".join(map(content_text, value)) if isinstance(value, list) else value


def content_text(value: object) -> str:
    """The text of one element of a content. Raises an error for what is no text."""
    try:
        if isinstance(value, dict) and value.get("type") == "refusal":
            return Refusal.model_validate(value).refusal
        return TextContent.model_validate(value).text
    except ValidationError:
        raise PydanticCustomError(
            "content_part", "may only have texts of the form {'type': 'input_text', 'text': ...}"
        ) from None


_ContentInput = str | list[TextContent | Refusal]
Content = Annotated[str, BeforeValidator(_text_of, json_schema_input_type=_ContentInput)]
_OptionalContent = Annotated[str | None, BeforeValidator(_text_of, json_schema_input_type=_ContentInput | None)]


class MessageItem(LenientModel):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(LenientModel):
    """A call of a function, as an earlier response had it."""

    type: Literal["function_call"]
    call_id: Id
    name: ToolName
    namespace: ToolName | None = None
    #: JSON as text.
    arguments: str


class CustomToolCallItem(LenientModel):
    """A call of a custom tool, as an earlier response had it."""

    type: Literal["custom_tool_call"]
    call_id: Id
    name: ToolName
    namespace: ToolName | None = None
    input: str


class CallOutputItem(LenientModel):
    """What a call has returned."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Id
    output: Content


class ReasoningItem(LenientModel):
    """Thinking, as an earlier response had it."""

    type: Literal["reasoning"]
    content: _OptionalContent = None
    summary: _OptionalContent = None
    encrypted_content: str | None = None


#: Types of items that are not left out.
KNOWN = (
    *("message", "function_call", "custom_tool_call", "function_call_output", "custom_tool_call_output"),
    *("reasoning", "item_reference"),
)


class ItemReference(LenientModel):
    """An item of a stored response, by its id."""

    type: Literal["item_reference"] | None = None
    id: Id


class OtherItem(LenientModel):
    """An item of a tool that this server does not have. It is left out of the conversation."""

    type: Annotated[str, MaxLen(64), other_than(KNOWN)]


Item = MessageItem | FunctionCallItem | CustomToolCallItem | CallOutputItem | ReasoningItem | ItemReference | OtherItem
_KINDS: Mapping[object, type[Item]] = {
    None: MessageItem,
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomToolCallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}

AnyModel = TypeVar("AnyModel", bound=BaseModel)


def read_one(cls: type[AnyModel], value: object, index: int) -> AnyModel:
    """One element of a list. Raises the first error, with where it is."""
    try:
        return cls.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        text = "is required" if first["type"] == "missing" else first["msg"]
        raise PydanticCustomError(LIST_ENTRY, "{text}", {"at": (index, *location(first)), "text": text}) from None


def read_items(value: object) -> list[Item]:
    """A text as a message of the user, or a list of items. By hand, because a union would list every member's error."""
    if isinstance(value, str):
        return [MessageItem(role="user", content=value)]
    if not isinstance(value, list):
        raise PydanticCustomError("items", "must be a text or a list of items")
    if not 1 <= len(value) <= MAX_MESSAGES:
        raise PydanticCustomError("items", "must have 1 to {limit} items", {"limit": MAX_MESSAGES})
    items: list[Item] = []
    for index, each in enumerate(value):
        kind = each.get("type") if isinstance(each, dict) else None
        if kind is None and isinstance(each, dict) and "id" in each and "role" not in each:
            kind = "item_reference"
        items.append(read_one(_KINDS.get(kind, OtherItem) if isinstance(kind, str | None) else OtherItem, each, index))
    return items


_ItemsInput = str | Annotated[list[Item], MinLen(1), MaxLen(MAX_MESSAGES)]
Items = Annotated[list[Item], PlainValidator(read_items, json_schema_input_type=_ItemsInput)]
