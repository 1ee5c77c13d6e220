"""Errors of Ollama's API: a text in `error`, with the status of other APIs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web

from pdserve.base.errors import NotFound, PdserveError, RequestError, codes_of
from router_svc.api.json_pieces import to_json
from router_svc.api.openai.errors import error_headers

#: Where paths of this API start.
PATHS = "/api/"
#: Paths of Ollama that change which models a server has.
MANAGING = ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete", "/api/blobs")
_FIXED_MODEL = (
    "This server has one model, with which its operator has started it; clients cannot pull, push, create, copy or "
    "delete models. GET /api/tags names the model to use, and `pdserve up MODEL` starts a server with another one."
)
#: Fields of chats in the texts of errors, as this API names them.
CHAT_NAMES = (
    ("response_format.json_schema.schema", "format"),
    ("response_format", "format"),
    ("`continue_final_message` needs a last message of the assistant", "The last message has to be one"),
    ("`continue_final_message` cannot go on", "An answer cannot go on"),
)
GENERATE_NAMES = (*CHAT_NAMES, ("`messages`", "`prompt`"))


def error_body(error: PdserveError) -> dict[str, str]:
    """`{"error": "..."}`."""
    return {"error": str(error)}


def error_response(error: PdserveError, request: web.Request) -> web.Response:
    """The whole response. A path by which models are managed does not exist, and the text says what does."""
    if isinstance(error, NotFound) and request.path.startswith(MANAGING):
        error = NotFound(f"{error} {_FIXED_MODEL}")
    return web.Response(
        status=codes_of(error).http,
        body=to_json(error_body(error)),
        content_type="application/json",
        headers=error_headers(error),
    )


@contextmanager
def in_own_words(names: Sequence[tuple[str, str]]) -> Iterator[None]:
    """Errors of the block name the fields of this API."""
    try:
        yield
    except RequestError as error:
        text = str(error)
        for theirs, own in names:
            text = text.replace(theirs, own)
        error.args = (text,)
        raise
