"""The request body of /v1/decisions, in the form of OpenAI's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from pdserve.base.sampling import MAX_LOGPROB_TOKEN_IDS
from router_svc.api.body import CACHE_SALT, MAX_NAME_CHARACTERS, GeneratingBody, StrictModel
from router_svc.api.lenient import by_field, tagged
from router_svc.api.openai.messages import MAX_MESSAGES, TemplateKwargs
from router_svc.api.responses.items import (
    CallOutputItem,
    CustomToolCallItem,
    FunctionCallItem,
    Item,
    LenientModel,
    MessageItem,
    Refusal,
    TextContent,
    content_text,
    read_one,
)
from router_svc.generation import MAX_PRIORITY

MAX_QUESTIONS = 400
#: Each choice has a label, whose log-probability is read.
MAX_CHOICES = MAX_LOGPROB_TOKEN_IDS
#: Their labels are digits.
MAX_LEVELS = 10


class JsonContent(LenientModel):
    """JSON, which the model gets as text."""

    type: Literal["input_json"]
    data: dict[str, Any] | list[dict[str, Any]]


def _text_of(value: object) -> object:
    """Content given as a list, as one text. Raises an error for content that is neither text nor JSON."""
    return "\n".join(map(_text_of_element, value)) if isinstance(value, list) else value


def _text_of_element(value: object) -> str:
    if not isinstance(value, dict) or value.get("type") != "input_json":
        return content_text(value)
    try:
        return json.dumps(JsonContent.model_validate(value).data, ensure_ascii=False)
    except ValidationError:
        raise PydanticCustomError(
            "content_part", "may only have an object or a list of objects as the data of an input_json"
        ) from None


_ContentInput = str | list[TextContent | Refusal | JsonContent]
_Content = Annotated[str, BeforeValidator(_text_of, json_schema_input_type=_ContentInput)]
_Name = Annotated[str, MaxLen(MAX_NAME_CHARACTERS)]
_NotEmpty = Annotated[str, MinLen(1)]


class DecisionMessage(MessageItem):
    """A message of the input."""

    content: _Content


class DecisionCallOutput(CallOutputItem):
    """What a call has returned."""

    output: _Content


_InputItem = DecisionMessage | FunctionCallItem | CustomToolCallItem | DecisionCallOutput
_KINDS: Mapping[object, type[_InputItem]] = {
    None: DecisionMessage,
    "message": DecisionMessage,
    "function_call": FunctionCallItem,
    "custom_tool_call": CustomToolCallItem,
    "function_call_output": DecisionCallOutput,
    "custom_tool_call_output": DecisionCallOutput,
}


def _read_input(value: object) -> list[Item]:
    if isinstance(value, str):
        return [DecisionMessage(role="user", content=value)]
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise PydanticCustomError(
            "input", "must be a text or a list of 1 to {limit} messages and calls", {"limit": MAX_MESSAGES}
        )
    items: list[Item] = []
    for index, each in enumerate(value):
        kind = each.get("type") if isinstance(each, dict) else None
        if not isinstance(kind, str | None) or kind not in _KINDS:
            raise PydanticCustomError(
                "input", "[{index}] is no message, no call and no output of a call", {"index": index}
            )
        items.append(read_one(_KINDS[kind], each, index))
    return items


_Input = str | Annotated[list[_InputItem], MinLen(1), MaxLen(MAX_MESSAGES)]


class Predicate(StrictModel):
    """Whether something is true of the input."""

    type: Literal["predicate"]
    instructions: _Content
    name: _Name | None = None


def _read_value(value: object) -> str | bool:
    if not isinstance(value, str | bool) or value == "":
        raise PydanticCustomError("choice_value", "must be a text that is not empty, or true or false")
    return value


class Option(StrictModel):
    """One of several answers. A text and a boolean of the same letters are different ones."""

    value: Annotated[str | bool, PlainValidator(_read_value, json_schema_input_type=_NotEmpty | bool)]
    description: str | None = None


class Choice(StrictModel):
    """Which of several answers is the best."""

    type: Literal["choice"]
    instructions: _Content
    choices: Annotated[list[Option], MinLen(2), MaxLen(MAX_CHOICES)]
    name: _Name | None = None

    @model_validator(mode="after")
    def _choices_differ(self) -> Choice:
        values = [(type(each.value), each.value) for each in self.choices]
        if len({*values}) < len(values):
            raise PydanticCustomError("choices", "choices has the same value twice. Send each one once")
        return self


class Level(StrictModel):
    """A level of a scale."""

    label: _NotEmpty
    description: str | None = None


class Score(StrictModel):
    """Where on a scale the input is. Levels are numbered from 0, in their order."""

    type: Literal["score"]
    instructions: _Content
    levels: Annotated[list[Level], MinLen(2), MaxLen(MAX_LEVELS)]
    name: _Name | None = None


Question = Annotated[
    Annotated[Predicate, tagged("predicate")] | Annotated[Choice, tagged("choice")] | Annotated[Score, tagged("score")],
    by_field("type", "must have a type: predicate, choice or score"),
]


class DecisionBody(GeneratingBody):
    """POST /v1/decisions."""

    input: Annotated[list[Item], PlainValidator(_read_input, json_schema_input_type=_Input)]
    questions: Annotated[list[Question], MinLen(1), MaxLen(MAX_QUESTIONS), Field(fail_fast=True)]
    chat_template_kwargs: TemplateKwargs | None = None
    #: Without effect: every prefix is cached.
    prompt_cache_options: dict[str, Any] | None = None
    #: Prompts share cached blocks only with prompts of the same salt.
    cache_salt: Annotated[str, StringConstraints(pattern=CACHE_SALT)] | None = None
    #: Lower values come first.
    priority: Annotated[int, Ge(-MAX_PRIORITY), Le(MAX_PRIORITY)] | None = None
