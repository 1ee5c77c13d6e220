"""GET /v1/requests/{id}/stream: goes on with a stream behind the last event that the client has, on any router."""

from __future__ import annotations

from aiohttp import web

from pdserve.base.errors import PdserveError
from router_svc.api.authentication import client_of
from router_svc.api.event_ids import HEADER, Seen, parse_event_id
from router_svc.api.generations import CHAT
from router_svc.api.http_request import IDS
from router_svc.api.ids import Ids
from router_svc.api.openai.event_stream import EventStream
from router_svc.api.openai.generation_api import timeout_of
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.openai.shapes import ChatFormat, CompletionFormat, ResponseFormatter
from router_svc.api.request_span import TRACE
from router_svc.api.resuming import HTTP, Resuming, event_ids
from router_svc.api.served_model import ServedModel
from router_svc.records.stream_log import StreamLog
from router_svc.request.replayed import ReplayedStream
from router_svc.request.requests import Requests


class ResumeApi:
    """/v1/requests/{id}/stream."""

    def __init__(self, model: ServedModel, requests: Requests, resuming: Resuming) -> None:
        self._model = model
        self._requests = requests
        self._resuming = resuming

    def routes(self) -> list[web.RouteDef]:
        """The endpoint for the application."""
        return [web.get("/v1/requests/{id}/stream", self._stream)]

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        client, seen = client_of(request), parse_event_id(request.headers.get(HEADER, ""))
        async with self._resuming.taken(client, HTTP, request.match_info["id"], seen) as (log, is_complete):
            generation = GenerationRequest.resumed(log.resumable)
            request[IDS] = ids = Ids(prefix="", header=log.resumable.shape.header_id)
            formatter = self._formatter(generation, log, seen)
            events = EventStream(request, ids)
            try:
                if is_complete:
                    await events.send(formatter, ReplayedStream(log, self._model.tokenizer))
                    return await events.end()
                request_id, timeout_s = generation.generations[0].request_id, timeout_of(request, self._requests)
                async with self._requests.open.entered(request_id, client.tenant, timeout_s) as opened:
                    opened.trace = request.get(TRACE)
                    async with self._requests.run(generation.generations, client, opened, log) as stream:
                        await events.send(formatter, stream)
            except PdserveError as error:
                events.fail(error)
            return await events.end()

    def _formatter(self, generation: GenerationRequest, log: StreamLog, seen: Seen) -> ResponseFormatter:
        tokenizer = self._model.tokenizer
        is_chat = generation.generations[0].endpoint == CHAT.name
        choices = ChatFormat(tokenizer) if is_chat else CompletionFormat(generation, tokenizer)
        return ResponseFormatter(generation, choices, event_ids(log, seen))
