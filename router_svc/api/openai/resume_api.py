"""GET /v1/requests/{id}/stream: goes on with a stream behind the last event that the client has, on any router."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from pdserve.base.errors import PdserveError, StaleError
from router_svc.api.authentication import client_of
from router_svc.api.event_ids import HEADER, Seen, parse_event_id
from router_svc.api.event_stream import EventStream, Formatter
from router_svc.api.http_request import IDS
from router_svc.api.ids import Ids
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.request_span import TRACE
from router_svc.api.responder import FormatterOf, Responder, timeout_of
from router_svc.api.resuming import HTTP, Resuming, event_ids
from router_svc.records.stream_log import StreamLog
from router_svc.request.replayed import ReplayedStream


class ResumeApi:
    """/v1/requests/{id}/stream."""

    def __init__(self, responder: Responder, resuming: Resuming, formatters: Mapping[str, FormatterOf]) -> None:
        """`formatters`: the format of a stream by the endpoint of its request."""
        self._responder = responder
        self._resuming = resuming
        self._formatters = formatters

    def routes(self) -> list[web.RouteDef]:
        """The endpoint for the application."""
        return [web.get("/v1/requests/{id}/stream", self._stream)]

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        client, seen = client_of(request), parse_event_id(request.headers.get(HEADER, ""))
        log, is_complete = await self._resuming.found(client, HTTP, request.match_info["id"], seen)
        backend, requests = self._responder.backend(request, log.resumable.shape.model), self._responder.open
        generation = GenerationRequest.resumed(log.resumable, backend.model)
        request[IDS] = ids = Ids(prefix="", header=log.resumable.shape.header_id)
        formatter = self._formatter(generation, log, seen)
        events = EventStream(request, ids)
        try:
            if is_complete:
                await events.send(formatter, ReplayedStream(log, backend.model.tokenizer))
                return await events.end()
            request_id, timeout_s = generation.generations[0].request_id, timeout_of(request, requests)
            async with requests.entered(request_id, client.tenant, timeout_s) as opened:
                opened.trace = request.get(TRACE)
                async with backend.requests.run(generation.generations, client, opened, log) as stream:
                    await events.send(formatter, stream)
        except PdserveError as error:
            events.fail(error)
        return await events.end()

    def _formatter(self, generation: GenerationRequest, log: StreamLog, seen: Seen) -> Formatter:
        endpoint = generation.generations[0].endpoint
        formatter_of = self._formatters.get(endpoint)
        if formatter_of is None:
            raise StaleError(
                f"The stream is of {endpoint}, which this router does not serve. Resume it on another one."
            )
        return formatter_of(generation, event_ids(log, seen))
