"""The endpoints that generate, from the HTTP request to the last byte of the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from pdserve.base.errors import PdserveError
from router_svc.api.authentication import client_of
from router_svc.api.http_request import IDS, MODEL, REQUEST_ID_HEADER, read_body
from router_svc.api.ids import Ids
from router_svc.api.intake import Intake
from router_svc.api.json_pieces import to_json
from router_svc.api.openai.errors import error_body
from router_svc.api.openai.generation_request import GenerationRequest, chat_request, completion_request
from router_svc.api.openai.schema import ChatBody, CompletionBody
from router_svc.api.openai.shapes import DONE, ChatFormat, ChoiceFormat, CompletionFormat, ResponseFormatter
from router_svc.api.request_span import TRACE
from router_svc.api.resuming import HTTP, Resuming, event_ids
from router_svc.api.served_model import ServedModel
from router_svc.request.output import ChoiceDelta
from router_svc.request.requests import Requests
from router_svc.request.stream import WRITE_TIMEOUT_S, DeltaSource, DeltaStream

#: A comment of server-sent events, which clients ignore.
_KEEP_ALIVE = b": the next token is awaited\n\n"


class GenerationApi:
    """/v1/completions and /v1/chat/completions."""

    def __init__(
        self,
        model: ServedModel,
        requests: Requests,
        max_model_len: Callable[[], int],
        intake: Intake,
        resuming: Resuming | None = None,
    ) -> None:
        """`resuming`: how streams can be resumed; None: they cannot."""
        self._resuming = resuming
        self._model = model
        self._requests = requests
        self._max_model_len = max_model_len
        self._intake = intake

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [
            web.post("/v1/completions", self._completions),
            web.post("/v1/chat/completions", self._chat),
        ]

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, CompletionBody, self._intake)
        request[MODEL] = body.model or ""
        ids = Ids.make("cmpl-", request.headers.get(REQUEST_ID_HEADER))
        generation = await completion_request(body, self._model, ids, self._max_model_len())
        return await self._respond(request, generation, ids, CompletionFormat(generation, self._model.tokenizer))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, ChatBody, self._intake)
        request[MODEL] = body.model or ""
        ids = Ids.make("chatcmpl-", request.headers.get(REQUEST_ID_HEADER))
        generation = await chat_request(body, self._model, ids, self._max_model_len())
        return await self._respond(request, generation, ids, ChatFormat(self._model.tokenizer))

    async def _respond(
        self, request: web.Request, generation: GenerationRequest, ids: Ids, choice_format: ChoiceFormat
    ) -> web.StreamResponse:
        # From here on, error responses have the ids in a header, too.
        request[IDS] = ids
        client = client_of(request)
        log = None
        # An answer in one piece can be fetched by those who know its id before they have it.
        if self._resuming is not None and (generation.stream or ids.is_chosen):
            log = self._resuming.new_log(client, HTTP, generation.shape(ids.header), generation.generations)
        formatter = ResponseFormatter(generation, choice_format, None if log is None else event_ids(log))
        async with self._requests.run(generation.generations, client, request.get(TRACE), log) as stream:
            if generation.stream:
                return await send_stream(request, formatter, stream, ids)
            return await _send_whole(formatter, stream)


async def _send_whole(formatter: ResponseFormatter, stream: DeltaStream) -> web.Response:
    collected = formatter.new_collection()

    async def collect(deltas: list[ChoiceDelta]) -> None:
        stream.first_write()
        for delta in deltas:
            collected[delta.choice_index].add(delta)

    await stream.write_to(collect)
    return web.Response(body=await formatter.whole(collected, stream.usage), content_type="application/json")


async def send_stream(
    request: web.Request, formatter: ResponseFormatter, stream: DeltaSource, ids: Ids
) -> web.StreamResponse:
    """Server-sent events. Headers go out with the first token, so that an earlier error has its own status.

    A client that reads slowly makes `write` wait. One that disconnects makes it raise, or cancels this handler.
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
        events = await formatter.events(deltas, stream.usage if formatter.continuous_usage else None)
        if not sse.prepared:
            await sse.prepare(request)
            events = await formatter.opening() + events
        if events:
            await sse.write(events)
            stream.first_write()

    async def keep_alive() -> None:
        if sse.prepared:
            await sse.write(_KEEP_ALIVE)

    try:
        await stream.write_to(write, keep_alive)
        last = formatter.closing(stream.usage)
    except PdserveError as error:
        if not sse.prepared:
            raise
        last = b"data: %b\n\n" % to_json(error_body(error)) + DONE
    if not sse.prepared:  # The client has all of a stream that it resumes.
        await sse.prepare(request)
    await _end(sse, last)
    return sse


async def _end(sse: web.StreamResponse, last: bytes) -> None:
    """Sends the last events. Raises `ConnectionResetError` for a client that reads nothing."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await sse.write(last)
            await sse.write_eof()
    except TimeoutError:
        raise ConnectionResetError(f"the client has read nothing for {WRITE_TIMEOUT_S:g} s") from None
