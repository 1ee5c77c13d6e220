"""Structural tags: free text in which tags have a structure, as vLLM and xgrammar write them.

There are two forms: a tree of formats, and the older lists of `structures` and `triggers`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le, MaxLen, MinLen
from pydantic import Field, model_validator

from router_svc.api.body import StrictModel

MAX_TEXT_CHARACTERS = 4096
MAX_ELEMENTS = 128
MAX_REPETITIONS = 1000
_Text = Annotated[str, MinLen(1), MaxLen(MAX_TEXT_CHARACTERS)]
_Texts = Annotated[list[_Text], MinLen(1), MaxLen(MAX_ELEMENTS)]
#: The end of a tag, or several from which the output takes one; "" is no end.
_End = Annotated[str, MaxLen(MAX_TEXT_CHARACTERS)]


class ConstString(StrictModel):
    """Exactly this text."""

    type: Literal["const_string"]
    value: _Text


class JsonSchemaContent(StrictModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any]
    style: Literal["json"] = "json"
    any_order: Literal[False] = False


class RegexContent(StrictModel):
    """A text that a regular expression matches."""

    type: Literal["regex"]
    pattern: _Text


class AnyText(StrictModel):
    """Free text: to the end of its tag, or of the output."""

    type: Literal["any_text"]
    excludes: Annotated[list[_Text], MaxLen(MAX_ELEMENTS)] = Field(default_factory=list)


class Sequence(StrictModel):
    """One format after the other."""

    type: Literal["sequence"]
    elements: Annotated[list[Format], MinLen(1), MaxLen(MAX_ELEMENTS)]


class Or(StrictModel):
    """One of several formats."""

    type: Literal["or"]
    elements: Annotated[list[Format], MinLen(1), MaxLen(MAX_ELEMENTS)]


class Several(StrictModel):
    """A format that may be missing, or come several times."""

    type: Literal["optional", "plus", "star"]
    content: Format


class Repeat(StrictModel):
    """A format that comes between `min` and `max` times; a `max` of -1 is no bound."""

    type: Literal["repeat"]
    min: Annotated[int, Ge(0), Le(MAX_REPETITIONS)]
    max: Annotated[int, Ge(-1), Le(MAX_REPETITIONS)]
    content: Format


class Tag(StrictModel):
    """A format between two texts."""

    type: Literal["tag"] = "tag"
    begin: _Text
    content: Format
    end: _End | _Texts


class TriggeredTags(StrictModel):
    """Free text in which a trigger is always the beginning of a tag."""

    type: Literal["triggered_tags"]
    triggers: _Texts
    tags: Annotated[list[Tag], MinLen(1), MaxLen(MAX_ELEMENTS)]
    at_least_one: bool = False
    stop_after_first: bool = False


class TagsWithSeparator(StrictModel):
    """Tags with a text between them, and nothing else."""

    type: Literal["tags_with_separator"]
    tags: Annotated[list[Tag], MinLen(1), MaxLen(MAX_ELEMENTS)]
    separator: _End
    at_least_one: bool = False
    stop_after_first: bool = False


Format = Annotated[
    ConstString
    | JsonSchemaContent
    | RegexContent
    | AnyText
    | Sequence
    | Or
    | Several
    | Repeat
    | Tag
    | TriggeredTags
    | TagsWithSeparator,
    Field(discriminator="type"),
]


class Structure(StrictModel):
    """A tag of the older form: JSON between two texts."""

    begin: _Text
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    end: _End


class StructuralTag(StrictModel):
    """Either a `format`, or `structures` with their `triggers`."""

    type: Literal["structural_tag"]
    format: Format | None = None
    structures: Annotated[list[Structure], MinLen(1), MaxLen(MAX_ELEMENTS)] | None = None
    triggers: _Texts | None = None

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        is_older = self.structures is not None and self.triggers is not None
        is_mixed = self.format is not None and (self.structures is not None or self.triggers is not None)
        if is_mixed or not (is_older or self.format is not None):
            raise ValueError("a structural tag has either `format`, or `structures` and `triggers`")
        return self

    @property
    def content(self) -> Format:
        """The format that either form means."""
        if self.format is not None:
            return self.format
        tags = [
            Tag(
                begin=each.begin,
                content=JsonSchemaContent(type="json_schema", json_schema=each.json_schema),
                end=each.end,
            )
            for each in self.structures or ()
        ]
        return TriggeredTags(type="triggered_tags", triggers=self.triggers or [], tags=tags)


def children(content: Format) -> Iterator[Format]:
    """The formats that a format contains directly."""
    match content:
        case Sequence() | Or():
            yield from content.elements
        case Several() | Repeat() | Tag():
            yield content.content
        case TriggeredTags() | TagsWithSeparator():
            yield from content.tags
