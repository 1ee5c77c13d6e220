"""The forms of errors in the OpenAPI document: OpenAI's, and those of the Messages API and Ollama's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.base.errors import CapacityError, PdserveError, all_codes, classes_of_status
from router_svc.api.anthropic.errors import CAPACITY_STATUS, ERROR_TYPES, OTHER_TYPES, OVERLOADED_STATUS, type_of

Schema = dict[str, Any]

_MESSAGE = {"type": "string", "description": "What failed, the value, the limit, and what to do."}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorForm:
    """How the errors of some operations look."""

    #: Name of the component that shows errors of any status.
    name: str
    #: The body of errors with this status; None: of any status.
    schema: Callable[[int | None], Schema]
    #: The errors that have a status.
    classes: Callable[[int], Sequence[type[PdserveError]]]


def _openai_schema(status: int | None) -> Schema:
    codes = [code for code in all_codes() if status in (None, code.http)]
    fields = {
        "message": _MESSAGE,
        "type": {"enum": sorted({code.openai_type for code in codes})},
        "param": {"type": ["string", "null"], "description": "The field at fault."},
        "code": {"enum": sorted({code.openai_code or code.http for code in codes}, key=str)},
    }
    return _object({"error": _object(fields)})


def _messages_schema(status: int | None) -> Schema:
    types = {*ERROR_TYPES.values(), *OTHER_TYPES} if status is None else {type_of(status)}
    error = _object({"type": {"enum": sorted(types)}, "message": _MESSAGE})
    request_id = {"type": ["string", "null"], "description": "The request's id, if the body could be read."}
    return _object({"type": {"const": "error"}, "error": error, "request_id": request_id})


def _messages_classes(status: int) -> Sequence[type[PdserveError]]:
    is_capacity = status == OVERLOADED_STATUS
    found = classes_of_status(CAPACITY_STATUS if is_capacity else status)
    return [each for each in found if status == 429 or issubclass(each, CapacityError) == is_capacity]


def _ollama_schema(_: int | None) -> Schema:
    return _object({"error": _MESSAGE})


def _object(fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": [*fields]}


OPENAI_ERRORS = ErrorForm(name="Error", schema=_openai_schema, classes=classes_of_status)
MESSAGES_ERRORS = ErrorForm(name="MessagesError", schema=_messages_schema, classes=_messages_classes)
OLLAMA_ERRORS = ErrorForm(name="OllamaError", schema=_ollama_schema, classes=classes_of_status)
