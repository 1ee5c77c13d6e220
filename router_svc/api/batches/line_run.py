"""Runs one request of a batch, as its endpoint would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdserve.base.batch_lines import BatchLine, result_line
from pdserve.base.errors import CapacityError, PdserveError, RequestError, TooLarge, codes_of
from router_svc.api.batches.results import Result
from router_svc.api.generations import RESPONSES, GenerationFactory
from router_svc.api.ids import Ids
from router_svc.api.openai.errors import error_body
from router_svc.api.openai.generation_api import CHAT_COMPLETION, COMPLETION
from router_svc.api.openai.generation_request import GenerationRequest
from router_svc.api.parse import parse_body
from router_svc.api.responder import GeneratingEndpoint, Responder, whole_body
from router_svc.api.responses.api import ResponsesApi
from router_svc.api.responses.request import responses_request
from router_svc.api.responses.schema import ResponsesBody
from router_svc.generation import BATCH_PRIORITY
from router_svc.request.client import Client

_OK = 200
#: Larger answers do not fit into the store.
_MAX_RESULT_BYTES = 16 << 20


class LineRunner:
    """Runs requests with the lowest priority: those that wait let all others pass."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    async def run(self, line: BatchLine, client: Client, timeout_s: float) -> Result:
        """The result, which may be an error. Raises `CapacityError` for what may succeed later.

        `timeout_s`: time that the request may take if it sets no timeout of its own.
        """
        ids = Ids.make(_ENDPOINTS[line.url].id_prefix, None)
        try:
            body = await self._body(line, client, ids, timeout_s)
            if len(body) > _MAX_RESULT_BYTES:
                raise TooLarge(f"The answer has {len(body)} bytes (limit {_MAX_RESULT_BYTES}). Ask for less.")
        except CapacityError:
            raise
        except PdserveError as error:
            refusal = json.dumps(error_body(error)).encode()
            line_bytes = result_line(line.custom_id, codes_of(error).http, ids.header, refusal)
            return Result(line_bytes, is_success=False)
        return Result(result_line(line.custom_id, _OK, ids.header, body), is_success=True)

    async def _body(self, line: BatchLine, client: Client, ids: Ids, timeout_s: float) -> bytes:
        open_requests = self._responder.open
        async with open_requests.entered(ids.of_prompt(0), client.tenant, timeout_s) as opened:
            generation, own_timeout_s = await self._generation(line, client, ids)
            if own_timeout_s is not None:
                opened.limit(open_requests.limits.require(own_timeout_s, param="timeout"))
            if any(each.priority for each in generation.generations):
                raise RequestError("`priority`: requests of a batch have the lowest. Leave it out.", param="priority")
            generations = [replace(each, priority=BATCH_PRIORITY) for each in generation.generations]
            formatter = _ENDPOINTS[line.url].formatter(self._responder)(generation, None)
            requests = self._responder.models[generation.model].requests
            async with requests.run(generations, client, opened) as stream:
                return await whole_body(formatter, stream)

    async def _generation(self, line: BatchLine, client: Client, ids: Ids) -> tuple[GenerationRequest, float | None]:
        """The request and its own timeout. Raises `RequestError`."""
        row, text = _ENDPOINTS[line.url], json.dumps(line.body).encode()
        body = await self._responder.intake.threads.run(len(text), lambda: parse_body(row.body, text))
        chosen = row.choose(body.model, self._responder.models, client)
        return await row.make(body, chosen.factory(ids, row.endpoint)), body.timeout


async def _response(body: ResponsesBody, factory: GenerationFactory) -> GenerationRequest:
    for name in ("store", "previous_response_id"):
        if getattr(body, name):
            raise RequestError(f"`{name}`: responses of a batch are in its results alone. Leave it out.", param=name)
    return await responses_request(body, factory)


_RESPONSE = GeneratingEndpoint(
    endpoint=RESPONSES,
    id_prefix="resp_",
    body=ResponsesBody,
    make=_response,
    formatter=lambda responder: ResponsesApi(responder).formatters()[RESPONSES.name],
)
#: Endpoints that lines may name, by URL.
_ENDPOINTS: Mapping[str, GeneratingEndpoint[Any]] = {
    row.endpoint.name: row for row in (COMPLETION, CHAT_COMPLETION, _RESPONSE)
}
