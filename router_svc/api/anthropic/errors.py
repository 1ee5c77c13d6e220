"""Errors of the Messages API: Anthropic's format, with a type by the status."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aiohttp import web

from pdserve.base.errors import CapacityError, PdserveError, RequestError, codes_of
from router_svc.api.http_request import IDS
from router_svc.api.json_pieces import to_json
from router_svc.api.openai.errors import error_headers
from router_svc.records.record_json import Json

#: Not a status of HTTP. Anthropic's clients know that it means a server without capacity at present.
OVERLOADED_STATUS = 529
#: Status of missing capacity in other APIs.
CAPACITY_STATUS = 503
ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}
#: The types of other statuses below 500, and from there on.
OTHER_TYPES = "invalid_request_error", "api_error"
_TOO_LONG = re.compile(r"The prompt has (at least )?(\d+) tokens, but the context holds (\d+)")
#: Fields of chats in the texts of errors, as this API names them.
_OWN_NAMES = (
    (".function.parameters", ".input_schema"),
    ("response_format.json_schema.schema", "output_config.format.schema"),
    ("response_format", "output_config.format"),
    ("`continue_final_message` needs a last message of the assistant", "The last message has to be one"),
    ("`continue_final_message` cannot go on", "An answer cannot go on"),
)


def status_of(error: PdserveError) -> int:
    """The HTTP status: that of other APIs, except where capacity is missing."""
    status = codes_of(error).http
    return OVERLOADED_STATUS if status == CAPACITY_STATUS and isinstance(error, CapacityError) else status


def type_of(status: int) -> str:
    """The type of errors with this status."""
    return ERROR_TYPES.get(status, OTHER_TYPES[status >= 500])


def error_body(error: PdserveError, request_id: str | None) -> dict[str, Json]:
    """`{"type": "error", "error": {"type", "message"}, "request_id"}`."""
    shown: dict[str, Json] = {"type": type_of(status_of(error)), "message": str(error)}
    return {"type": "error", "error": shown, "request_id": request_id}


def error_response(error: PdserveError, request: web.Request) -> web.Response:
    """The whole response."""
    ids = request.get(IDS)
    return web.Response(
        status=status_of(error),
        body=to_json(error_body(error, None if ids is None else ids.header)),
        content_type="application/json",
        headers=error_headers(error),
    )


@contextmanager
def in_own_words() -> Iterator[None]:
    """Errors of the block name the fields of this API, and say of a prompt what its clients look for in a text."""
    try:
        yield
    except RequestError as error:
        text = str(error)
        for theirs, own in _OWN_NAMES:
            text = text.replace(theirs, own)
        if found := _TOO_LONG.match(text):
            # Claude Code then makes its conversation shorter.
            text = f"prompt is too long: {found[2]} tokens > {found[3]} maximum. {text}"
        error.args = (text,)
        raise
