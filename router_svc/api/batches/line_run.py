"""Runs one request of a batch, as its endpoint would."""

from __future__ import annotations

import json
from dataclasses import replace

from pdserve.base.batch_lines import BatchLine, result_line
from pdserve.base.errors import CapacityError, PdserveError, RequestError, TooLarge, codes_of
from router_svc.api.batches.results import Result
from router_svc.api.generations import CHAT, COMPLETIONS, RESPONSES
from router_svc.api.ids import Ids
from router_svc.api.openai.errors import error_body
from router_svc.api.openai.generation_api import GenerationApi
from router_svc.api.openai.generation_request import GenerationRequest, chat_request, completion_request
from router_svc.api.openai.schema import ChatBody, CompletionBody
from router_svc.api.parse import parse_body
from router_svc.api.responder import Responder, whole_body
from router_svc.api.responses.api import ResponsesApi
from router_svc.api.responses.request import responses_request
from router_svc.api.responses.schema import ResponsesBody
from router_svc.generation import BATCH_PRIORITY
from router_svc.request.client import Client

_OK = 200
#: Larger answers do not fit into the store.
_MAX_RESULT_BYTES = 16 << 20
_PREFIXES = {CHAT.name: "chatcmpl-", COMPLETIONS.name: "cmpl-", RESPONSES.name: "resp_"}


class LineRunner:
    """Runs requests with the lowest priority: those that wait let all others pass."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder
        self._formatters = GenerationApi(responder).formatters() | ResponsesApi(responder).formatters()

    async def run(self, line: BatchLine, client: Client, timeout_s: float) -> Result:
        """The result, which may be an error. Raises `CapacityError` for what may succeed later.

        `timeout_s`: time that the request may take if it sets no timeout of its own.
        """
        ids = Ids.make(_PREFIXES[line.url], None)
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
            formatter = self._formatters[line.url](generation, None)
            requests = self._responder.models[generation.model].requests
            async with requests.run(generations, client, opened) as stream:
                return await whole_body(formatter, stream)

    async def _generation(self, line: BatchLine, client: Client, ids: Ids) -> tuple[GenerationRequest, float | None]:
        """The request and its own timeout. Raises `RequestError`."""
        threads, models = self._responder.intake.threads, self._responder.models
        text = json.dumps(line.body).encode()
        if line.url == CHAT.name:
            chat = await threads.run(len(text), lambda: parse_body(ChatBody, text))
            chosen = models.chosen(chat.model, client)
            return await chat_request(chat, chosen.model, ids, chosen.max_model_len()), chat.timeout
        if line.url == COMPLETIONS.name:
            completion = await threads.run(len(text), lambda: parse_body(CompletionBody, text))
            chosen = models.chosen(completion.model, client)
            made = await completion_request(completion, chosen.model, ids, chosen.max_model_len())
            return made, completion.timeout
        body = await threads.run(len(text), lambda: parse_body(ResponsesBody, text))
        for name in ("store", "previous_response_id"):
            if getattr(body, name):
                raise RequestError(
                    f"`{name}`: responses of a batch are in its results alone. Leave it out.", param=name
                )
        chosen = models.chosen(body.model, client)
        return await responses_request(body, chosen.model, ids, chosen.max_model_len()), body.timeout
