"""The messages of a conversation in the request of a chat, and the variables of its template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
    model_validator,
    with_config,
)
from pydantic_core import CoreSchema, PydanticCustomError
from typing_extensions import TypedDict

from pdserve.model.tokenizer_settings import SPECIAL_TOKENS
from router_svc.api.body import MAX_NAME_CHARACTERS, StrictModel
from router_svc.api.body_schema import Schema, given_unless, with_conditions, with_harmless
from router_svc.api.fields import MESSAGE_UNSUPPORTED, without_neutral
from router_svc.api.openai.tools import ToolCall

MAX_MESSAGES = 4096
MAX_TEMPLATE_KWARGS = 16
#: Characters of one value of `chat_template_kwargs`: templates print them, possibly once per message.
MAX_TEMPLATE_KWARG_CHARACTERS = 4096
#: Characters of a template.
MAX_TEMPLATE_CHARACTERS = 65_536
MAX_CALLS = 128
MAX_DOCUMENTS = 256

#: Variables of chat templates that clients may not set: the request's own, and the model's special tokens.
_TEMPLATE_OWN = frozenset({"self", "messages", "add_generation_prompt", "tools", "documents", *SPECIAL_TOKENS})

Scalar = bool | int | float | str

TemplateSource = Annotated[str, MinLen(1), MaxLen(MAX_TEMPLATE_CHARACTERS)]

_INT65 = (Ge(-(2**64) + 1), Le(2**64 - 1))
_ScalarInput = (
    bool | Annotated[int, *_INT65] | Annotated[float, *_INT65] | Annotated[str, MaxLen(MAX_TEMPLATE_KWARG_CHARACTERS)]
)
_TemplateKwargName = WithJsonSchema(
    {
        "type": "string",
        "maxLength": MAX_NAME_CHARACTERS,
        "pattern": "^[A-Za-z_][A-Za-z0-9_]*$",
        "not": {"enum": sorted(_TEMPLATE_OWN)},
    }
)


@with_config(ConfigDict(extra="forbid"))
class MessageText(TypedDict):
    """Text of a message."""

    type: Literal["text"]
    text: str


def _only_texts(value: object) -> object:
    """The content. Raises an error for what is neither a text nor a list of text parts."""
    if value is not None and not isinstance(value, (str, list)):
        raise PydanticCustomError("content_type", "must be a valid string, or a list of text parts")
    for element in value if isinstance(value, list) else ():
        kind = element.get("type") if isinstance(element, dict) else None
        text = element.get("text") if isinstance(element, dict) else None
        if kind != "text" or not isinstance(text, str) or len(element) > 2:
            raise PydanticCustomError("content_part", "may only have parts of the form {'type': 'text', 'text': ...}")
    return value


def _template_kwarg_name(name: str) -> str:
    if name in _TEMPLATE_OWN or not name.isidentifier():
        raise PydanticCustomError("template_kwarg", "is not a variable that clients may set in a chat template")
    return name


def _scalar(value: object) -> Scalar:
    if isinstance(value, str) and len(value) > MAX_TEMPLATE_KWARG_CHARACTERS:
        raise PydanticCustomError(
            "template_kwarg_length",
            "has {length} characters (limit {limit}). Send long texts in messages",
            {"length": len(value), "limit": MAX_TEMPLATE_KWARG_CHARACTERS},
        )
    if isinstance(value, int) and value.bit_length() > 64:
        raise PydanticCustomError("template_kwarg_length", "must be an integer of at most 64 bits")
    if isinstance(value, (bool, int, float, str)):
        return value
    raise PydanticCustomError("scalar", "must be a string, a number, true or false")


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[MessageText] | None, BeforeValidator(_only_texts)] = None
    name: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] | None = None
    tool_call_id: Annotated[str, MaxLen(MAX_NAME_CHARACTERS)] | None = None
    tool_calls: Annotated[list[ToolCall], MaxLen(MAX_CALLS)] | None = None
    #: The assistant's thinking, under both names that clients have for it.
    reasoning: str | None = None
    reasoning_content: str | None = None

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        schema = handler.resolve_ref_schema(handler(core))
        with_harmless(schema, MESSAGE_UNSUPPORTED)
        return with_conditions(schema, (given_unless("content", "role", "assistant"),))

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, value: object) -> object:
        return without_neutral(value, MESSAGE_UNSUPPORTED) if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _only_the_assistant_may_omit_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", f"a message of role {self.role} requires content")
        return self

    @property
    def argument_characters(self) -> int:
        """How much JSON `for_template` reads."""
        return sum(len(call.function.arguments) for call in self.tool_calls or ())

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        thinking = self.reasoning_content or self.reasoning
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "tool_calls": [call.for_template() for call in self.tool_calls or ()],
            "reasoning_content": thinking,
            "reasoning": thinking,
            # gpt-oss refuses thinking beside content in a message with calls.
            "thinking": None if self.tool_calls and self.content else thinking,
        }
        given = {name: value for name, value in optional.items() if value}
        return {"role": self.role, "content": self.content or "", **given}


Messages = Annotated[list[ChatMessage], MinLen(1), MaxLen(MAX_MESSAGES), Field(fail_fast=True)]
#: What the conversation is about, as objects whose fields are the template's matter.
Documents = Annotated[list[dict[str, Any]], MaxLen(MAX_DOCUMENTS)]
TemplateKwargs = Annotated[
    dict[
        Annotated[str, MaxLen(MAX_NAME_CHARACTERS), AfterValidator(_template_kwarg_name), _TemplateKwargName],
        Annotated[Scalar, PlainValidator(_scalar, json_schema_input_type=_ScalarInput)],
    ],
    MaxLen(MAX_TEMPLATE_KWARGS),
]
