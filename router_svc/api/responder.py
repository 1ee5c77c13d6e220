"""One request that generates, from its body to the last byte of the response, whatever the form of both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from aiohttp import web

from pdserve.base.errors import PdserveError
from pdserve.model.tokenizer import Tokenizer
from pdserve.peers.secret import ClusterSecret
from router_svc.api.authentication import client_of
from router_svc.api.body import GeneratingBody
from router_svc.api.event_ids import EventIds
from router_svc.api.event_stream import EventStream, Formatter
from router_svc.api.generations import Endpoint, GenerationFactory
from router_svc.api.http_request import IDS, IGNORED_FIELDS, MODEL, REQUEST_ID_HEADER, read_body
from router_svc.api.ids import Ids
from router_svc.api.intake import Intake
from router_svc.api.models import ModelBackend, Models
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.request_span import TRACE
from router_svc.api.resuming import HTTP, Resuming, event_ids
from router_svc.request.client import Client
from router_svc.request.open_requests import OpenRequest, OpenRequests
from router_svc.request.output import ChoiceDelta
from router_svc.request.stream import DeltaStream
from router_svc.routing.timeouts import TIMEOUT_FIELD, TIMEOUT_HEADER

AnyBody = TypeVar("AnyBody", bound=GeneratingBody)
#: Makes the format of a response. The ids are those of its events; None: they have none.
FormatterOf = Callable[[GenerationRequest, EventIds | None], Formatter]
#: Answers a request that runs in the background.
Detach = Callable[[GenerationRequest, Ids], Awaitable[web.StreamResponse]]
#: Makes the generations of a request from its body, within the time that the request has.
Render = Callable[[OpenRequest, Ids], Awaitable[GenerationRequest]]


def _by_name(name: str | None, models: Models, client: Client) -> ModelBackend:
    return models.chosen(name, client)


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingEndpoint(Generic[AnyBody]):
    """An HTTP endpoint that generates: what it reads, what it makes of that, and the form of its answers."""

    #: Its path and its name in records.
    endpoint: Endpoint
    #: Start of the ids of its answers.
    id_prefix: str
    body: type[AnyBody]
    #: Makes the generations from a body. Raises `RequestError`.
    make: Callable[[AnyBody, GenerationFactory], Awaitable[GenerationRequest]]
    #: The format of its answers. Called when a request arrives.
    formatter: Callable[[Responder], FormatterOf]
    #: The model by its name in the body. Raises `NotFound`, `Forbidden`, `RequestError`.
    choose: Callable[[str | None, Models, Client], ModelBackend] = _by_name


@dataclass(frozen=True, slots=True)
class Responder:
    """What all endpoints that generate have in common."""

    models: Models
    #: The open requests of all models.
    open: OpenRequests
    intake: Intake
    #: How streams can be resumed; None: they cannot.
    resuming: Resuming | None = None
    #: What the routers of a cluster share; None: the cluster is open.
    secret: ClusterSecret | None = None

    async def read(self, request: web.Request, kind: type[AnyBody], opened: OpenRequest) -> AnyBody:
        """The body, whose timeout holds from here on."""
        body = await read_body(request, kind, self.intake)
        request[MODEL] = body.model
        if body.timeout is not None:
            opened.limit(self.open.limits.require(body.timeout, param=TIMEOUT_FIELD))
        return body

    def route(self, row: GeneratingEndpoint[AnyBody]) -> web.RouteDef:
        """The endpoint for the application."""

        async def respond(request: web.Request) -> web.StreamResponse:
            formatter = row.formatter(self)

            async def render(opened: OpenRequest, ids: Ids) -> GenerationRequest:
                body = await self.read(request, row.body, opened)
                factory = row.choose(body.model, self.models, client_of(request)).factory(ids, row.endpoint)
                try:
                    return await row.make(body, factory)
                finally:
                    request[IGNORED_FIELDS] += tuple(factory.ignored_fields)

            return await self.respond(request, row.id_prefix, render, formatter)

        return web.post(row.endpoint.name, respond)

    def backend(self, request: web.Request, name: str | None) -> ModelBackend:
        """The model that the request names. Raises `NotFound`, `Forbidden`, `RequestError`."""
        return self.models.chosen(name, client_of(request))

    def tokenizer(self, generation: GenerationRequest) -> Tokenizer:
        """The tokenizer of the model that a request was accepted for."""
        return self.models[generation.model].model.tokenizer

    async def respond(
        self,
        request: web.Request,
        prefix: str,
        render: Render,
        formatter_of: FormatterOf,
        detach: Detach | None = None,
    ) -> web.StreamResponse:
        """The response, whose id starts with `prefix`. `detach` answers requests that run in the background."""
        ids = Ids.make(prefix, request.headers.get(REQUEST_ID_HEADER))
        events, client = EventStream(request, ids), client_of(request)
        try:
            timeout_s = timeout_of(request, self.open)
            async with self.open.entered(ids.of_prompt(0), client.tenant, timeout_s) as opened:
                generation = await render(opened, ids)
                # From here on, error responses have the ids in a header, too.
                request[IDS] = ids
                opened.trace = request.get(TRACE)
                if not generation.in_background or detach is None:
                    whole = await self._run(generation, formatter_of, events, client, opened, ids)
                    if whole is not None:
                        return whole
            if generation.in_background and detach is not None:
                return await detach(generation, ids)
        except PdserveError as error:
            events.fail(error)
        return await events.end()

    async def _run(
        self,
        generation: GenerationRequest,
        formatter_of: FormatterOf,
        events: EventStream,
        client: Client,
        opened: OpenRequest,
        ids: Ids,
    ) -> web.Response | None:
        """Runs the request. Returns the response, unless it is streamed."""
        log = None
        # An answer in one piece can be fetched by those who know its id before they have it.
        is_kept = (generation.stream or ids.is_chosen) and not generation.scores_prompts
        if self.resuming is not None and is_kept and generation.can_be_resumed:
            log = self.resuming.new_log(client, HTTP, generation.shape(ids.header), generation.generations)
        formatter = formatter_of(generation, None if log is None else event_ids(log))
        requests = self.models[generation.model].requests
        async with requests.run(generation.generations, client, opened, log) as stream:
            if not generation.stream:
                return web.Response(body=await whole_body(formatter, stream), content_type="application/json")
            await events.send(formatter, stream)
            return None


def timeout_of(request: web.Request, requests: OpenRequests) -> float:
    """The timeout in the request's header, else the default. Raises `RequestError`."""
    return requests.limits.of_header(request.headers.get(TIMEOUT_HEADER))


async def whole_body(formatter: Formatter, stream: DeltaStream) -> bytes:
    """The whole answer. Raises what ends the stream early."""
    collected = formatter.new_collection()

    async def collect(deltas: list[ChoiceDelta]) -> None:
        if deltas[0].prompt_logprobs is None:
            stream.first_write()
        for delta in deltas:
            collected[delta.choice_index].add(delta)

    await stream.write_to(collect)
    return await formatter.whole(collected, stream.usage)
