"""Request handling that all HTTP endpoints share: reading the body, and keeping the ids for response headers."""

from __future__ import annotations

import re
from typing import TypeVar

from aiohttp import web

from pdserve.base.errors import UnsupportedMediaType
from pdserve.observe.audit import Caller
from router_svc.api.body import Body
from router_svc.api.ids import Ids, is_valid_id
from router_svc.api.intake import Intake

REQUEST_ID_HEADER = "X-Request-Id"
#: Key of a request's ids, which error responses carry, too.
IDS = web.RequestKey("ids", Ids)
#: Key of the model that a request names, for the audit log.
MODEL = web.RequestKey("model", str)
#: Key of the names of fields that were ignored, since they are unknown.
IGNORED_FIELDS = web.RequestKey("ignored_fields", tuple[str, ...])
IGNORED_FIELDS_HEADER = "Pdserve-Ignored-Fields"
_MAX_SHOWN = 32
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.\[\]-]", re.ASCII)
#: The only type of bodies. A page of another origin cannot send it without the router's consent.
_JSON = "application/json"

AnyBody = TypeVar("AnyBody", bound=Body)


def caller_of(request: web.Request) -> Caller:
    """Who sent the request, for the audit log."""
    ids, chosen = request.get(IDS), request.headers.get(REQUEST_ID_HEADER, "")
    return Caller(
        client=request.remote or "unknown",
        endpoint=f"{request.method} {request.path}",
        model=request.get(MODEL, ""),
        request_id=ids.response if ids is not None else chosen if is_valid_id(chosen) else "",
        forwarded_for=request.headers.get("X-Forwarded-For", ""),
    )


async def read_body(request: web.Request, cls: type[AnyBody], intake: Intake) -> AnyBody:
    """The validated body of the request. Raises `RequestError` or `Overloaded`."""
    require_json(request)
    body = await intake.read(request, cls)
    request[IGNORED_FIELDS] = body.ignored_fields
    return body


def add_ignored_fields(app: web.Application) -> None:
    """Every answer to a body with unknown fields that were ignored names them in a header."""

    async def add(request: web.Request, response: web.StreamResponse) -> None:
        names = request.get(IGNORED_FIELDS, ())
        if names:
            shown = [_NOT_IN_NAMES.sub("_", name) for name in names[:_MAX_SHOWN]]
            more = [f"and {len(names) - _MAX_SHOWN} more"] if len(names) > _MAX_SHOWN else []
            response.headers[IGNORED_FIELDS_HEADER] = ", ".join(shown + more)

    app.on_response_prepare.append(add)


def require_json(request: web.Request) -> None:
    """Raises `UnsupportedMediaType` for a body of another type: one that any web page may send without asking."""
    if request.content_type != _JSON:
        given = request.headers.get("Content-Type")
        what = "has no Content-Type" if given is None else f"has the Content-Type {given[:100]!r}"
        raise UnsupportedMediaType(f"The request {what}. Send JSON, with `Content-Type: {_JSON}`.")
