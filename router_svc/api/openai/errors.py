"""Errors as HTTP responses: OpenAI's format, a status from the table of errors, and Retry-After."""

from __future__ import annotations

import json
import math

from aiohttp import web

from pdserve.base.errors import (
    CapacityError,
    EndedEarly,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    PdserveError,
    RequestError,
    Unauthorized,
    codes_of,
)
from router_svc.records.record_json import Json

#: Typical time for a worker to restart or to free capacity.
_CAPACITY_RETRY_AFTER_S = 1.0


def error_body(error: PdserveError) -> dict[str, Json]:
    """`{"error": {"message", "type", "param", "code"}}`."""
    codes = codes_of(error)
    param = error.param if isinstance(error, RequestError) else None
    return {
        "error": {
            "message": str(error),
            "type": codes.openai_type,
            "param": param,
            "code": codes.openai_code or codes.http,
        }
    }


def error_headers(error: PdserveError) -> dict[str, str]:
    """What clients of any API read in headers: when to try again, and whether."""
    headers = {}
    if isinstance(error, CapacityError):
        wait_s = error.retry_after_s if isinstance(error, Overloaded) else _CAPACITY_RETRY_AFTER_S
        headers["Retry-After"] = str(math.ceil(wait_s))
    if isinstance(error, EndedEarly):
        # OpenAI's and Anthropic's clients repeat a request after a status of 500 or more, unless this says otherwise.
        headers["x-should-retry"] = "false"
    if isinstance(error, MethodNotAllowed):
        headers["Allow"] = ", ".join(error.allowed)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_response(error: PdserveError) -> web.Response:
    """The whole response."""
    return web.Response(
        status=codes_of(error).http,
        text=json.dumps(error_body(error)),
        content_type="application/json",
        headers=error_headers(error),
    )


def from_http_exception(error: web.HTTPException, request: web.Request) -> PdserveError:
    """The pdserve error for an error that aiohttp raised."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        limit = request.client_max_size
        return PayloadTooLarge(f"The request body exceeds the limit of {limit} bytes (--max-body). Send less.")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = sorted(error.allowed_methods)
        return MethodNotAllowed(
            f"{request.path[:100]} accepts {', '.join(allowed)}, not {request.method[:20]}.", allowed=allowed
        )
    if isinstance(error, web.HTTPNotFound):
        return NotFound(f"The path {request.path[:100]} does not exist.")
    return RequestError(f"The request is invalid: {error.reason}.")
