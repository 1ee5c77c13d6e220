"""GET /v1/requests/{id}/stream: goes on with a stream behind the last event that the client has, on any router."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

from pdserve.base.errors import NotFound, RequestError, StaleError
from router_svc.api.authentication import client_of
from router_svc.api.event_ids import HEADER, parse_event_id
from router_svc.api.generations import CHAT
from router_svc.api.http_request import IDS
from router_svc.api.ids import Ids, is_traceable_id
from router_svc.api.openai.generation_api import send_stream
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.openai.resuming import Resuming, event_ids, owner_of
from router_svc.api.openai.shapes import ChatFormat, CompletionFormat, ResponseFormatter
from router_svc.api.request_span import TRACE
from router_svc.api.served_model import ServedModel
from router_svc.records.stream_log import StreamLog
from router_svc.records.traces import ID_PREFIXES
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
        seen = parse_event_id(request.headers.get(HEADER, ""))
        if not self._resuming.logs.is_on:
            raise NotFound("Streams of this server cannot be resumed. Start its routers with --resume-timeout-s.")
        owner = owner_of(client_of(request))
        for header_id in _header_ids(request.match_info["id"]):
            async with self._resuming.logs.take(owner, header_id, seen.name) as taken:
                if taken is None:
                    continue
                log, is_complete = taken
                return await self._send(request, log, is_complete=is_complete)
        # The same for what never was, is over, or belongs to others.
        raise NotFound(
            "There is no stream of this id that can be resumed: it is unknown, has ended with an error, or ended too "
            "long ago. Send the request again."
        )

    async def _send(self, request: web.Request, log: StreamLog, *, is_complete: bool) -> web.StreamResponse:
        self._require_same_model(log)
        generation = GenerationRequest.resumed(log.resumable)
        ids = Ids(prefix="", header=log.resumable.shape.header_id)
        request[IDS] = ids
        choices = (
            ChatFormat(self._model.tokenizer)
            if generation.generations[0].endpoint == CHAT.name
            else CompletionFormat(generation, self._model.tokenizer)
        )
        seen = parse_event_id(request.headers.get(HEADER, ""))
        formatter = ResponseFormatter(generation, choices, event_ids(log, generation, seen))
        if is_complete:
            return await send_stream(request, formatter, ReplayedStream(log, self._model.tokenizer), ids)
        async with self._requests.run(generation.generations, client_of(request), request.get(TRACE), log) as stream:
            return await send_stream(request, formatter, stream, ids)

    def _require_same_model(self, log: StreamLog) -> None:
        made_by = _model_name(log.resumable.shape.model, log.resumable.model_revision)
        served = _model_name(self._model.name, self._resuming.model_revision)
        if made_by != served:
            raise StaleError(
                f"The stream is of the model {made_by}, and this router serves {served}. Resume it on a router of the "
                "former, or send the request again."
            )


def _model_name(name: str, revision: str) -> str:
    return f"{name}@{revision}" if revision else name


def _header_ids(given: str) -> Iterator[str]:
    """What X-Request-Id may have been: the id itself, or the rest of the response's id. Raises `RequestError`."""
    if not is_traceable_id(given):
        raise RequestError(
            "The id is not valid. Request ids have letters, digits, '.', '_' and '-', at most 128.", param="id"
        )
    yield given
    for prefix in ID_PREFIXES:
        if given.startswith(prefix):
            yield given.removeprefix(prefix)
