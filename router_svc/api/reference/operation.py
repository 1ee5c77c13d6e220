"""What the OpenAPI document says of one method of one path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router_svc.api.body import Body
from router_svc.api.reference.error_forms import OPENAI_ERRORS, ErrorForm
from router_svc.api.reference.parameters import Parameter

#: Statuses of errors that any request may have. 401 comes with the key.
ALWAYS = (400, 403, 431, 500)
JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"
BINARY = "application/octet-stream"
FORM = "multipart/form-data"
#: Statuses of operations with a body, and of those whose body workers compute.
BODY_ERRORS = (413, 415, 429)
GENERATION_ERRORS = (*BODY_ERRORS, 404, 422, 499, 502, 503, 504)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer that is no error. `schema` is a type, or a JSON Schema; None: it has no body."""

    text: str
    media: str = JSON
    #: Another media type of the same content, for those that ask for it.
    other_media: str = ""
    schema: Any = None
    #: The schema of the other media type; None: the same.
    other_schema: Any = None
    #: Type of the data of each event, for an answer that may be streamed.
    events: Any = None
    #: Type of each line, for an answer that may be streamed as lines of JSON.
    lines: Any = None
    headers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path. `errors` are the statuses of errors besides those of `ALWAYS`."""

    tag: str
    summary: str
    answers: Mapping[int, Answer]
    body: type[Body] | None = None
    #: The JSON Schema of a form that is sent instead of a body in JSON.
    form: Mapping[str, Any] | None = None
    parameters: tuple[Parameter, ...] = ()
    errors: tuple[int, ...] = ()
    errors_form: ErrorForm = OPENAI_ERRORS
