"""Requests that are pooled, from a body to the embeddings of its prompts."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from pdserve.base.errors import RequestError, TooLarge
from pdserve.base.pooling import Pooling
from pdserve.base.sampling import SamplingParams
from pdserve.base.tasks import in_turns
from router_svc.api.authentication import client_of
from router_svc.api.generations import Endpoint
from router_svc.api.http_request import IDS, REQUEST_ID_HEADER
from router_svc.api.ids import Ids
from router_svc.api.models import ModelBackend
from router_svc.api.pooling.answers import PoolingUsage
from router_svc.api.pooling.schema import PoolingBody
from router_svc.api.prompt_tokens import tokens_to_keep
from router_svc.api.request_span import TRACE
from router_svc.api.responder import Responder, timeout_of
from router_svc.generation import Generation, TextRules
from router_svc.request.client import Client
from router_svc.request.open_requests import OpenRequest
from router_svc.request.output import ChoiceDelta

#: Numbers of all embeddings of one request: 16 MiB.
MAX_NUMBERS = 4_194_304
#: There is no output, and so nothing to sample.
_NO_OUTPUT = SamplingParams(temperature=0.0, max_tokens=0)
_NO_TEXT = TextRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledRequest:
    """Prompts that are pooled."""

    backend: ModelBackend
    generations: tuple[Generation, ...]
    response_id: str
    created: int

    @property
    def usage(self) -> PoolingUsage:
        """Tokens of all prompts."""
        num_tokens = sum(len(generation.prompt) for generation in self.generations)
        return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


#: Makes the response from the embeddings of the prompts, in their order.
Answer = Callable[[PooledRequest, Sequence[bytes]], Awaitable[bytes]]
#: Reads the body, within the time that the request has.
Render = Callable[[OpenRequest, Ids], Awaitable[tuple[PooledRequest, Answer]]]


class Pooler:
    """What all endpoints with embeddings have in common."""

    def __init__(self, responder: Responder) -> None:
        self.responder = responder

    async def respond(self, request: web.Request, prefix: str, render: Render) -> web.Response:
        """The response, whose id starts with `prefix`. Raises the error for the client."""
        requests, client = self.responder.open, client_of(request)
        ids = Ids.make(prefix, request.headers.get(REQUEST_ID_HEADER))
        timeout = timeout_of(request, requests)
        async with requests.entered(ids.of_prompt(0), client.tenant, timeout) as opened:
            pooled, answer = await render(opened, ids)
            # From here on, error responses have the ids in a header, too.
            request[IDS] = ids
            opened.trace = request.get(TRACE)
            embeddings = await embeddings_of(pooled, client, opened)
            return web.Response(body=await answer(pooled, embeddings), content_type="application/json")


async def embeddings_of(pooled: PooledRequest, client: Client, opened: OpenRequest) -> Sequence[bytes]:
    """The embeddings of the prompts, in their order. Raises the error for the client."""
    embeddings = [b""] * len(pooled.generations)

    async def collect(deltas: list[ChoiceDelta]) -> None:
        for delta in deltas:
            if delta.embedding is not None:
                embeddings[delta.choice_index] = delta.embedding

    async with pooled.backend.requests.run(pooled.generations, client, opened) as stream:
        await stream.write_to(collect)
    return embeddings


async def pooled_prompts(
    body: PoolingBody,
    chosen: ModelBackend,
    texts: Sequence[str],
    ids: Sequence[list[int]] = (),
    *,
    param: str,
    cuts: bool = False,
) -> list[list[int]]:
    """The prompts of a request, which are texts or token ids. `cuts`: long prompts are cut to their start.

    Raises `RequestError`.
    """
    model, max_model_len = chosen.model, chosen.max_model_len()
    keep = tokens_to_keep(body.truncate_prompt_tokens, 1, max_model_len)
    if ids:
        kept = [each if keep is None else each[-keep:] for each in ids]
        await model.check_prompts(kept, max_model_len, param=param)
        return kept
    special = body.add_special_tokens is not False
    encoded = await model.encode(
        texts, add_special_tokens=special, max_model_len=None if cuts else max_model_len, keep=keep, param=param
    )
    if cuts:
        encoded = [each[: max_model_len - 1] for each in encoded]
    if not all(encoded):
        raise RequestError(f"`{param}` has a text without tokens. Send texts that are not empty.", param=param)
    return encoded


async def pooled_request(
    body: PoolingBody,
    chosen: ModelBackend,
    prompts: Sequence[list[int]],
    pooling: Pooling,
    endpoint: Endpoint,
    ids: Ids,
) -> PooledRequest:
    """The prompts with everything that decides their embeddings."""
    generations = [
        Generation(
            request_id=ids.of_prompt(index),
            worker_request_id=ids.for_workers(index),
            prompt=tuple(prompt),
            sampling=_NO_OUTPUT,
            text=_NO_TEXT,
            first_choice=index,
            pooling=pooling,
            priority=body.priority or 0,
            cache_salt=(body.cache_salt or "").encode(),
            endpoint=endpoint.name,
        )
        async for index, prompt in in_turns(enumerate(prompts))
    ]
    return PooledRequest(
        backend=chosen, generations=tuple(generations), response_id=ids.response, created=int(time.time())
    )


def require_few_numbers(num_prompts: int, dimensions: int, limit: int = MAX_NUMBERS, *, param: str) -> None:
    """Raises `TooLarge` for embeddings that are too many numbers in all."""
    if num_prompts * dimensions > limit:
        raise TooLarge(
            f"{num_prompts} embeddings with {dimensions} dimensions are more than {limit} numbers. Split the request.",
            param=param,
        )
