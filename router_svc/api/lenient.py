"""Objects in bodies of the Messages and Ollama APIs: known fields are checked, and unknown ones ignored and reported.

Clients of these APIs send fields without asking whether the server has them.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Discriminator, Tag

from router_svc.api.parse import MAX_ECHO, TAG_MARK

#: Unknown fields are kept, so that their names can be reported.
LENIENT = ConfigDict(extra="allow", strict=True, frozen=True)


class LenientModel(BaseModel):
    """An object within a body."""

    model_config = LENIENT


def tagged(kind: str) -> Tag:
    """The mark of one of several kinds of objects."""
    return Tag(TAG_MARK + kind)


#: The kind of a value that is a text instead of an object.
TEXT = "text value"


def by_field(name: str, problem: str) -> Discriminator:
    """Finds the kind of an object by a field of it. A text is of the kind `TEXT`.

    `problem`: what is said of an object of no kind.
    """

    def kind_of(value: object) -> str | None:
        if isinstance(value, str):
            return TAG_MARK + TEXT
        found = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
        return TAG_MARK + found if isinstance(found, str) else None

    return Discriminator(kind_of, custom_error_type=name, custom_error_message=problem)


def unknown_fields(body: BaseModel) -> list[str]:
    """The names of the unknown fields within a parsed body, as `messages[].content[].cursor`, without repetition."""
    found: dict[str, None] = {}
    _collect(body, "", found)
    return list(found)


def _collect(value: BaseModel, start: str, found: dict[str, None]) -> None:
    if value.model_extra:
        found.update(((start + name)[:MAX_ECHO], None) for name in value.model_extra)
    for name, each in value.__dict__.items():
        if isinstance(each, BaseModel):
            _collect(each, f"{start}{name}.", found)
        elif type(each) is list:
            inside = f"{start}{name}[]."
            for element in each:
                if isinstance(element, BaseModel):
                    _collect(element, inside, found)
