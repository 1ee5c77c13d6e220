"""Parameters and headers of the HTTP API as the OpenAPI document shows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from router_svc.api.batches.batches_api import BATCH_ID
from router_svc.api.event_ids import HEADER as LAST_EVENT_HEADER
from router_svc.api.event_ids import SCHEMA as LAST_EVENT_SCHEMA
from router_svc.api.files.files_api import FILE_ID, MAX_LIMIT
from router_svc.api.files.stored_files import MAX_FILES
from router_svc.api.openai.info import DEFAULT_REQUESTS, MAX_REQUESTS
from router_svc.api.usage_api import DEFAULT_DAYS
from router_svc.records.usage_store import RETENTION_DAYS
from router_svc.routing.timeouts import TIMEOUT_HEADER

Schema = Mapping[str, Any]

#: Ids that clients choose, and those of decision records (`router_svc.api.ids`).
CHOSEN_ID = "^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
TRACEABLE_ID = "^[A-Za-z0-9][A-Za-z0-9._-]{0,143}(:[0-9]{1,3})?$"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of a request."""

    name: str
    where: Literal["path", "query", "header"]
    text: str
    schema: Schema

    def as_json(self) -> dict[str, Any]:
        """The parameter in the document."""
        return {
            "name": self.name,
            "in": self.where,
            "description": self.text,
            "required": self.where == "path",
            "schema": dict(self.schema),
        }


GENERATION = (
    Parameter(
        name="X-Request-Id",
        where="header",
        text="The request's id. One that does not match is replaced by a random one.",
        schema={"type": "string", "pattern": CHOSEN_ID},
    ),
    Parameter(
        name=TIMEOUT_HEADER,
        where="header",
        text="Seconds from the arrival until the request ends, complete or not; the field `timeout` may shorten it.",
        schema={"type": "number", "exclusiveMinimum": 0},
    ),
    Parameter(
        name="traceparent",
        where="header",
        text="The W3C trace that the request belongs to. One that is not valid is ignored.",
        schema={"type": "string"},
    ),
)
MODEL_NAME = Parameter(
    name="name", where="path", text="The model's name; slashes are part of it.", schema={"type": "string"}
)
QUERIED_MODEL = Parameter(
    name="model",
    where="query",
    text="A model's name. Required where the server has several.",
    schema={"type": "string"},
)
RECORD_ID = Parameter(
    name="id",
    where="path",
    text="The `id` of an answer, or its `X-Request-Id`; further prompts end with `:` and a number.",
    schema={"type": "string", "pattern": TRACEABLE_ID},
)
RESPONSE_ID = Parameter(
    name="id",
    where="path",
    text="The `id` of a stored response of the caller's tenant.",
    schema={"type": "string", "pattern": TRACEABLE_ID},
)
FOLLOW = (
    Parameter(
        name="stream",
        where="query",
        text="`true`: events of a response that runs in the background.",
        schema={"type": "string"},
    ),
    Parameter(
        name="starting_after",
        where="query",
        text="The `sequence_number` of the last event that the client has.",
        schema={"type": "integer", "minimum": -1, "maximum": 2**53},
    ),
)
PAGE = (
    Parameter(
        name="limit",
        where="query",
        text="How many items at most. Default: 20.",
        schema={"type": "integer", "minimum": 1, "maximum": 100},
    ),
    Parameter(
        name="order",
        where="query",
        text="`asc`: the first item first. Default: `desc`.",
        schema={"enum": ["asc", "desc"]},
    ),
    Parameter(
        name="after", where="query", text="The id of the last item that the client has.", schema={"type": "string"}
    ),
)
FILE_PARAMETER = Parameter(
    name="id",
    where="path",
    text="The `id` of a file of the caller's tenant.",
    schema={"type": "string", "pattern": FILE_ID},
)
FILE_PAGE = (
    Parameter(
        name="purpose", where="query", text="Only files of this purpose. Default: all.", schema={"type": "string"}
    ),
    Parameter(
        name="limit",
        where="query",
        text=f"How many files at most. Default: {MAX_FILES}.",
        schema={"type": "integer", "minimum": 1, "maximum": MAX_LIMIT},
    ),
    *PAGE[1:],
)
BATCH_PARAMETER = Parameter(
    name="id",
    where="path",
    text="The `id` of a batch of the caller's tenant.",
    schema={"type": "string", "pattern": BATCH_ID},
)
LAST_EVENT_ID = Parameter(
    name=LAST_EVENT_HEADER,
    where="header",
    text="The `id` of the last event that the client has. Without it, the stream begins at its start.",
    schema=LAST_EVENT_SCHEMA,
)
NAME = Parameter(name="name", where="path", text="The file's name.", schema={"type": "string"})
LIMIT = Parameter(
    name="limit",
    where="query",
    text="How many requests to list.",
    schema={"type": "integer", "minimum": 1, "maximum": MAX_REQUESTS, "default": DEFAULT_REQUESTS},
)
_DAY = {"type": "string", "format": "date", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}
USAGE = (
    Parameter(
        name="from",
        where="query",
        text=f"The first day. Default: {DEFAULT_DAYS} days, with `to`. There are at most {RETENTION_DAYS}.",
        schema=_DAY,
    ),
    Parameter(name="to", where="query", text="The last day. Default: today, in UTC.", schema=_DAY),
    Parameter(
        name="format",
        where="query",
        text="The form of the answer.",
        schema={"type": "string", "enum": ["json", "csv"], "default": "json"},
    ),
)
ETAG = Parameter(
    name="If-None-Match",
    where="header",
    text="The `ETag` of the copy that the client has.",
    schema={"type": "string"},
)

#: What a key with limits gets with every answer.
RATE_LIMITS = tuple(
    f"x-ratelimit-{word}-{unit}" for unit in ("requests", "tokens") for word in ("limit", "remaining", "reset")
)

#: Headers of answers.
HEADERS: Mapping[str, Mapping[str, Any]] = {
    "X-Request-Id": {
        "description": "The request's id, if the body could be read.",
        "schema": {"type": "string", "pattern": CHOSEN_ID},
    },
    "request-id": {
        "description": "The same, where Anthropic's clients look for it.",
        "schema": {"type": "string", "pattern": CHOSEN_ID},
    },
    "Pdserve-Ignored-Fields": {
        "description": "Fields of the request that were ignored, since they are unknown or do nothing here.",
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "Seconds after which another try may succeed.",
        "schema": {"type": "integer", "minimum": 0},
    },
    "x-should-retry": {
        "description": "`false`: another try makes no sense. OpenAI's clients read it.",
        "schema": {"const": "false"},
    },
    **{
        f"x-ratelimit-{word}-{unit}": {
            "description": f"Of a key with a limit of {unit} per minute: {text}.",
            "schema": {"type": "string", "pattern": pattern},
        }
        for unit in ("requests", "tokens")
        for word, text, pattern in (
            ("limit", "the limit", "^[0-9]+$"),
            ("remaining", "what is left", "^[0-9]+$"),
            ("reset", "time until all of it is back, such as `6m0s`", "^([0-9]+m)?[0-9]+(s|ms)$"),
        )
    },
    "WWW-Authenticate": {"description": "The scheme of keys.", "schema": {"const": "Bearer"}},
    "Location": {"description": "A relative address.", "schema": {"type": "string"}},
    "ETag": {"description": "Names this version of the content.", "schema": {"type": "string"}},
    "Content-Security-Policy": {
        "description": "Everything that the page loads comes from this router.",
        "schema": {"type": "string"},
    },
}
