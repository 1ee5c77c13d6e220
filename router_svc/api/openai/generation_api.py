"""The endpoints that generate, from the HTTP request to the last byte of the response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from pdserve.base.errors import PdserveError
from router_svc.api.authentication import client_of
from router_svc.api.http_request import IDS, MODEL, REQUEST_ID_HEADER, read_body
from router_svc.api.ids import Ids
from router_svc.api.intake import Intake
from router_svc.api.openai.event_stream import EventStream
from router_svc.api.openai.generation_request import GenerationRequest, chat_request, completion_request
from router_svc.api.openai.schema import ChatBody, CompletionBody
from router_svc.api.openai.shapes import ChatFormat, ChoiceFormat, CompletionFormat, ResponseFormatter
from router_svc.api.request_span import TRACE
from router_svc.api.resuming import HTTP, Resuming, event_ids
from router_svc.api.served_model import ServedModel
from router_svc.request.open_requests import OpenRequest
from router_svc.request.output import ChoiceDelta
from router_svc.request.requests import Requests
from router_svc.request.stream import DeltaStream
from router_svc.routing.timeouts import TIMEOUT_FIELD, TIMEOUT_HEADER

GeneratingBody = TypeVar("GeneratingBody", CompletionBody, ChatBody)
#: The prompts of a request, and the form of its choices.
Rendered = tuple[GenerationRequest, ChoiceFormat]


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
        async def completion(opened: OpenRequest, ids: Ids) -> Rendered:
            body = await self._read(request, CompletionBody, opened)
            generation = await completion_request(body, self._model, ids, self._max_model_len())
            return generation, CompletionFormat(generation, self._model.tokenizer)

        return await self._respond(request, Ids.make("cmpl-", request.headers.get(REQUEST_ID_HEADER)), completion)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        async def chat(opened: OpenRequest, ids: Ids) -> Rendered:
            body = await self._read(request, ChatBody, opened)
            generation = await chat_request(body, self._model, ids, self._max_model_len())
            return generation, ChatFormat(self._model.tokenizer)

        return await self._respond(request, Ids.make("chatcmpl-", request.headers.get(REQUEST_ID_HEADER)), chat)

    async def _read(self, request: web.Request, kind: type[GeneratingBody], opened: OpenRequest) -> GeneratingBody:
        """The body, whose timeout holds from here on."""
        body = await read_body(request, kind, self._intake)
        request[MODEL] = body.model or ""
        if body.timeout is not None:
            opened.limit(self._requests.open.limits.require(body.timeout, param=TIMEOUT_FIELD))
        return body

    async def _respond(
        self, request: web.Request, ids: Ids, render: Callable[[OpenRequest, Ids], Awaitable[Rendered]]
    ) -> web.StreamResponse:
        events, client = EventStream(request, ids), client_of(request)
        try:
            async with self._requests.open.entered(
                ids.of_prompt(0), client.tenant, timeout_of(request, self._requests)
            ) as opened:
                generation, choice_format = await render(opened, ids)
                # From here on, error responses have the ids in a header, too.
                request[IDS] = ids
                opened.trace = request.get(TRACE)
                log = None
                # An answer in one piece can be fetched by those who know its id before they have it.
                if self._resuming is not None and (generation.stream or ids.is_chosen):
                    log = self._resuming.new_log(client, HTTP, generation.shape(ids.header), generation.generations)
                event_names = None if log is None else event_ids(log)
                formatter = ResponseFormatter(generation, choice_format, event_names)
                async with self._requests.run(generation.generations, client, opened, log) as stream:
                    if not generation.stream:
                        return await _send_whole(formatter, stream)
                    await events.send(formatter, stream)
        except PdserveError as error:
            events.fail(error)
        return await events.end()


def timeout_of(request: web.Request, requests: Requests) -> float:
    """The timeout in the request's header, else the default. Raises `RequestError`."""
    return requests.open.limits.of_header(request.headers.get(TIMEOUT_HEADER))


async def _send_whole(formatter: ResponseFormatter, stream: DeltaStream) -> web.Response:
    collected = formatter.new_collection()

    async def collect(deltas: list[ChoiceDelta]) -> None:
        stream.first_write()
        for delta in deltas:
            collected[delta.choice_index].add(delta)

    await stream.write_to(collect)
    return web.Response(body=await formatter.whole(collected, stream.usage), content_type="application/json")
