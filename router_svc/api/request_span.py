"""The span of a client's request, from its arrival to the end of its response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.typedefs import Middleware

from pdserve.base.errors import PdserveError, codes_of
from pdserve.base.trace_context import TRACEPARENT, TraceContext, parse_traceparent
from pdserve.observe.tracing.spans import Attribute, Span, SpanKind, Tracer
from router_svc.api.generations import CHAT, COMPLETIONS, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE, RESPONSES

#: Key of the span's context, within which the request is run. Absent without a trace.
TRACE = web.RequestKey("trace", TraceContext)
#: Other endpoints answer from memory and are not traced.
_TRACED = frozenset(each.name for each in (CHAT, COMPLETIONS, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE, RESPONSES))

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True, kw_only=True)
class RequestSpan:
    """A request that has arrived. The handler may add attributes."""

    context: TraceContext | None
    attributes: dict[str, Attribute] = field(default_factory=dict)
    error: str | None = None


@contextmanager
def request_span(tracer: Tracer, name: str, parent: TraceContext | None) -> Iterator[RequestSpan]:
    """Records the time that the block takes, if the request is sampled."""
    span = RequestSpan(context=tracer.start(parent))
    if span.context is None or not tracer.records(span.context):
        yield span
        return
    start = time.time()
    try:
        yield span
    except (asyncio.CancelledError, ConnectionError):
        span.attributes["pdserve.client_left"] = True
        raise
    except PdserveError as error:
        span.error = type(error).__name__ if codes_of(error).http >= 500 else None
        raise
    finally:
        tracer.emit(
            [
                Span(
                    name=name,
                    context=span.context,
                    parent_id=None if parent is None else parent.span_id,
                    start=start,
                    end=time.time(),
                    kind=SpanKind.SERVER,
                    attributes=span.attributes,
                    error=span.error,
                )
            ]
        )


def http_tracing(tracer: Tracer) -> Middleware:
    """A middleware that opens the span of a request and keeps its context under `TRACE`."""

    @web.middleware
    async def traced(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in _TRACED:
            return await handler(request)
        parent = parse_traceparent(request.headers.get(TRACEPARENT))
        with request_span(tracer, f"{request.method} {request.path}", parent) as span:
            if span.context is not None:
                request[TRACE] = span.context
            span.attributes |= {"http.request.method": request.method, "http.route": request.path}
            response = await handler(request)
            span.attributes["http.response.status_code"] = response.status
            span.error = str(response.status) if response.status >= 500 else None
            return response

    return traced
