"""/v1/responses: making a response."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from aiohttp import web

from pdserve.base.errors import RequestError
from router_svc.api.authentication import client_of
from router_svc.api.event_ids import EventIds
from router_svc.api.event_stream import Formatter
from router_svc.api.generations import RESPONSES
from router_svc.api.http_request import IGNORED_FIELDS
from router_svc.api.ids import Ids
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.openai.messages import MAX_MESSAGES
from router_svc.api.responder import FormatterOf, Responder, timeout_of
from router_svc.api.responses import conversation, tools
from router_svc.api.responses.backend import ResponsesBackend
from router_svc.api.responses.followed import send_events
from router_svc.api.responses.formatter import ResponsesFormatter
from router_svc.api.responses.items import read_items
from router_svc.api.responses.references import resolved
from router_svc.api.responses.request import Kept, responses_request
from router_svc.api.responses.schema import ResponsesBody
from router_svc.api.responses.stored_api import response_of
from router_svc.api.text_threads import INLINE_CHARACTERS
from router_svc.request.open_requests import OpenRequest

_NO_STORE = "this server stores no responses (it was started without --state-url)"


class ResponsesApi:
    """OpenAI's Responses API."""

    def __init__(self, responder: Responder, backend: ResponsesBackend | None = None) -> None:
        """`backend` None: responses are not stored."""
        self._responder = responder
        self._stored = None if backend is None else backend.stored
        self._runs = None if backend is None else backend.runs

    def routes(self) -> list[web.RouteDef]:
        """The endpoint for the application."""
        return [web.post("/v1/responses", self._create)]

    def formatters(self) -> dict[str, FormatterOf]:
        """The format of the responses, by endpoint."""
        return {RESPONSES.name: self._formatter}

    async def _create(self, request: web.Request) -> web.StreamResponse:
        kept: Kept | None = None
        timeout_s = timeout_of(request, self._responder.open)

        async def response(opened: OpenRequest, ids: Ids) -> GenerationRequest:
            nonlocal kept, timeout_s
            body = await self._responder.read(request, ResponsesBody, opened)
            request[IGNORED_FIELDS] += tuple(_left_out(body))
            timeout_s = body.timeout or timeout_s
            chosen = self._responder.backend(request, body.model)
            body, kept = await self._with_store(request, body, ids)
            return await responses_request(body, chosen.factory(ids, RESPONSES), kept)

        async def detach(generation: GenerationRequest, ids: Ids) -> web.StreamResponse:
            assert kept is not None
            assert self._runs is not None
            record = await self._runs.start(generation, kept, client_of(request), timeout_s)
            if not generation.stream:
                return response_of(record)
            return await send_events(request, ids, self._runs.follow(record, after=-1))

        return await self._responder.respond(request, "resp_", response, self._formatter, detach)

    async def _with_store(
        self, request: web.Request, body: ResponsesBody, ids: Ids
    ) -> tuple[ResponsesBody, Kept | None]:
        """The request with the whole conversation, and what is stored of it. Raises `RequestError`, `StoreError`."""
        for name in ("store", "background", "previous_response_id"):
            if getattr(body, name) and self._stored is None:
                raise RequestError(f"`{name}` needs a store, and {_NO_STORE}.", param=name)
        if body.background and body.store is False:
            raise RequestError("`background` needs `store`: leave it out, or send true.", param="background")
        client, num_before = client_of(request), 0
        if self._stored is not None:
            own = await resolved(body.input, self._stored, client.tenant, self._responder.intake.threads)
            body = body.model_copy(update={"input": own})
        if body.previous_response_id is not None:
            assert self._stored is not None
            before = await self._stored.before(client.tenant, body.previous_response_id)
            body, num_before = await self._continued(body, before), len(before)
        if self._stored is None or body.store is False:
            return body, None
        await self._stored.require_available()
        if ids.is_chosen:
            await self._stored.require_not_running(client.tenant, ids.response)
        dumped = await self._responder.intake.threads.run(
            INLINE_CHARACTERS + 1, lambda: [item.model_dump(exclude_none=True) for item in body.input]
        )
        return body, Kept(tenant=client.tenant, key_id=client.id, items=dumped, first_own_item=num_before)

    async def _continued(self, body: ResponsesBody, before: list[Mapping[str, Any]]) -> ResponsesBody:
        """The request with the items of the conversation before it. Raises `RequestError`."""
        total = len(before) + len(body.input)
        if total > MAX_MESSAGES:
            raise RequestError(
                f"The conversation has {total} items with those before `previous_response_id` (limit {MAX_MESSAGES}). "
                "Start another one with a summary of it.",
                param="previous_response_id",
            )
        items = await self._responder.intake.threads.run(INLINE_CHARACTERS + 1, lambda: read_items(before))
        return body.model_copy(update={"input": [*items, *body.input]})

    def _formatter(self, generation: GenerationRequest, ids: EventIds | None) -> Formatter:
        kept = json.loads(generation.request_fields)["kept"]
        keep = None
        if kept is not None and self._stored is not None:
            keep = partial(self._stored.keep, kept, is_again=generation.is_resumed)
        return ResponsesFormatter(generation, self._responder.tokenizer(generation), ids, keep)


def _left_out(body: ResponsesBody) -> dict[str, None]:
    """The types of tools and items that the request names and this server does not have."""
    names = [f"tools[].{kind}" for kind in tools.left_out(body.tools or ())]
    names += [f"input[].{kind}" for kind in conversation.left_out(body.input)]
    return dict.fromkeys(names)
