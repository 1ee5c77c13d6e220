"""/api/embed and /api/embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from aiohttp import web

from pdserve.base.vectors import floats
from router_svc.api.authentication import client_of
from router_svc.api.generations import Endpoint
from router_svc.api.ids import Ids
from router_svc.api.json_pieces import list_to_json, to_json
from router_svc.api.ollama.embed_schema import OllamaEmbedBody, OllamaEmbeddingsBody
from router_svc.api.ollama.errors import in_own_words
from router_svc.api.ollama.names import chosen_by_name
from router_svc.api.ollama.timing import Timing
from router_svc.api.openai.shapes import in_slices
from router_svc.api.pooling.embedding_request import embedding_request
from router_svc.api.pooling.pooled import Answer, PooledRequest, Pooler
from router_svc.api.responder import Responder
from router_svc.request.open_requests import OpenRequest

_EMBED = Endpoint(name="/api/embed", prompt_param="input")
_EMBEDDINGS = Endpoint(name="/api/embeddings", prompt_param="prompt")
#: Answers of this API have no id. The request's id is in a header.
_NO_PREFIX = ""


class OllamaEmbeddingsApi:
    """/api/embed and /api/embeddings."""

    def __init__(self, responder: Responder) -> None:
        self._pooler = Pooler(responder)

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [web.post("/api/embed", self._embed), web.post("/api/embeddings", self._embeddings)]

    async def _embed(self, request: web.Request) -> web.StreamResponse:
        timing = Timing()

        async def render(opened: OpenRequest, ids: Ids) -> tuple[PooledRequest, Answer]:
            body = await self._pooler.responder.read(request, OllamaEmbedBody, opened)
            chosen = chosen_by_name(body.model, self._pooler.responder.models, client_of(request))
            meant = body.meant(chosen.name)
            cuts = body.truncate is not False
            pooled = await embedding_request(meant, chosen, _EMBED, ids, cuts=cuts)
            return pooled, partial(_answer, timing)

        return await self._pooler.respond(request, _NO_PREFIX, render)

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        async def render(opened: OpenRequest, ids: Ids) -> tuple[PooledRequest, Answer]:
            body = await self._pooler.responder.read(request, OllamaEmbeddingsBody, opened)
            chosen = chosen_by_name(body.model, self._pooler.responder.models, client_of(request))
            meant = body.meant(chosen.name)
            with in_own_words((("`input`", "`prompt`"),)):
                return await embedding_request(meant, chosen, _EMBEDDINGS, ids, cuts=True), _one

        return await self._pooler.respond(request, _NO_PREFIX, render)


async def _answer(timing: Timing, pooled: PooledRequest, embeddings: Sequence[bytes]) -> bytes:
    end = {"total_duration": timing.durations()[0], "load_duration": 0}
    end["prompt_eval_count"] = pooled.usage["prompt_tokens"]

    def pieces() -> Iterator[bytes]:
        yield b'{"model":%b,"embeddings":[' % to_json(pooled.backend.name)
        for index, values in enumerate(embeddings):
            yield b"%b%b" % (b"," if index else b"", _numbers(values))
        yield b"]," + to_json(end)[1:]

    return await in_slices(pieces())


async def _one(_: PooledRequest, embeddings: Sequence[bytes]) -> bytes:
    return b'{"embedding":%b}' % _numbers(embeddings[0])


def _numbers(values: bytes) -> bytes:
    return list_to_json(floats(values), float)
