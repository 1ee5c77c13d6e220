"""The endpoints that generate: from the HTTP request to the last byte of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from aiohttp import web

from pdserve.base.errors import PdserveError, RequestError
from pdserve.base.logs import get_logger
from router_svc.api.ids import Ids
from router_svc.api.openai.errors import error_body
from router_svc.api.openai.jobs import Job, chat_job, completion_job
from router_svc.api.openai.schema import Body, ChatBody, CompletionBody
from router_svc.api.openai.shapes import ChatFormat, ChoiceFormat, CompletionFormat, Response, to_json
from router_svc.api.parse import parse_body
from router_svc.api.served_model import ServedModel
from router_svc.request.output import ChoiceDelta
from router_svc.request.requests import Requests
from router_svc.request.stream import WRITE_TIMEOUT_S, DeltaStream

log = get_logger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
#: The ids of the request that is being answered, once it has some.
IDS = web.RequestKey("ids", Ids)
_DONE = b"data: [DONE]\n\n"
#: A client that sends its body slower than this is not waited for.
_BODY_TIMEOUT_S = 60.0
#: Larger bodies are parsed in a thread.
_INLINE_BODY_BYTES = 64 * 1024

AnyBody = TypeVar("AnyBody", bound=Body)


class GenerationApi:
    """/v1/completions and /v1/chat/completions."""

    def __init__(self, model: ServedModel, requests: Requests, max_model_len: Callable[[], int]) -> None:
        self._model = model
        self._requests = requests
        self._max_model_len = max_model_len

    def routes(self) -> list[web.RouteDef]:
        """What to add to the application."""
        return [
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._chat),
        ]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, CompletionBody)
        ids = Ids.make("cmpl-", request.headers.get(REQUEST_ID_HEADER))
        job = await completion_job(body, self._model, ids, self._max_model_len())
        return await self._answer(request, job, ids, CompletionFormat(job, self._model.tokenizer))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, ChatBody)
        ids = Ids.make("chatcmpl-", request.headers.get(REQUEST_ID_HEADER))
        job = await chat_job(body, self._model, ids, self._max_model_len())
        return await self._answer(request, job, ids, ChatFormat(self._model.tokenizer))

    async def _answer(
        self, request: web.Request, job: Job, ids: Ids, choice_format: ChoiceFormat
    ) -> web.StreamResponse:
        request[IDS] = ids
        response = Response(job, choice_format)
        async with self._requests.run(job.generations) as stream:
            if job.stream:
                return await _send_stream(request, response, stream, ids)
            return await _send_whole(response, stream)


async def read_body(request: web.Request, cls: type[AnyBody]) -> AnyBody:
    """The request's body, checked. Raises `RequestError`."""
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            body = await request.read()
    except TimeoutError:
        raise RequestError(f"The request body did not arrive within {_BODY_TIMEOUT_S:.0f} s.") from None
    if len(body) <= _INLINE_BODY_BYTES:
        return parse_body(cls, body)
    return await asyncio.to_thread(parse_body, cls, body)


async def _send_whole(response: Response, stream: DeltaStream) -> web.Response:
    collected = response.new_collection()

    async def collect(deltas: list[ChoiceDelta]) -> None:
        stream.first_write()
        for delta in deltas:
            collected[delta.choice_index].add(delta)

    await stream.write_to(collect)
    return web.Response(body=to_json(response.whole(collected, stream.usage)), content_type="application/json")


async def _send_stream(request: web.Request, response: Response, stream: DeltaStream, ids: Ids) -> web.StreamResponse:
    """Server-sent events. Headers go out with the first token, so that what fails before it has a status of its own.

    A client that reads slowly makes `write` wait; one that went away makes it raise, or cancels this handler.
    """
    sse = web.StreamResponse(
        headers={
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
            REQUEST_ID_HEADER: ids.header,
        }
    )

    async def write(deltas: list[ChoiceDelta]) -> None:
        events = response.events(deltas, stream.usage if response.continuous_usage else None)
        if not sse.prepared:
            await sse.prepare(request)
            events = response.opening() + events
        if events:
            await sse.write(events)
            stream.first_write()

    try:
        await stream.write_to(write)
        last = response.closing(stream.usage)
    except PdserveError as error:
        if not sse.prepared:
            raise
        last = b"data: %b\n\n" % to_json(error_body(error))
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await sse.write(last + _DONE)
    except TimeoutError:
        raise ConnectionResetError(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s") from None
    await sse.write_eof()
    return sse
