"""/v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from functools import partial

from aiohttp import web

from pdserve.base.vectors import floats
from router_svc.api.generations import Endpoint
from router_svc.api.ids import Ids
from router_svc.api.json_pieces import integers_to_json, list_to_json, to_json
from router_svc.api.openai.shapes import in_slices
from router_svc.api.pooling.embedding_request import embedding_request
from router_svc.api.pooling.pooled import Answer, PooledRequest, Pooler
from router_svc.api.pooling.schema import EmbeddingBody
from router_svc.api.responder import Responder
from router_svc.request.open_requests import OpenRequest

_ENDPOINT = Endpoint(name="/v1/embeddings", prompt_param="input")


class EmbeddingsApi:
    """/v1/embeddings."""

    def __init__(self, responder: Responder) -> None:
        self._pooler = Pooler(responder)

    def routes(self) -> list[web.RouteDef]:
        """The endpoint for the application."""
        return [web.post("/v1/embeddings", self._embeddings)]

    async def _embeddings(self, request: web.Request) -> web.StreamResponse:
        async def render(opened: OpenRequest, ids: Ids) -> tuple[PooledRequest, Answer]:
            body = await self._pooler.responder.read(request, EmbeddingBody, opened)
            pooled = await embedding_request(body, self._pooler.responder.backend(request, body.model), _ENDPOINT, ids)
            return pooled, partial(self._answer, body)

        return await self._pooler.respond(request, "embd-", render)

    async def _answer(self, body: EmbeddingBody, pooled: PooledRequest, embeddings: Sequence[bytes]) -> bytes:
        head = to_json(
            {"id": pooled.response_id, "object": "list", "created": pooled.created, "model": pooled.backend.name}
        )

        def pieces() -> Iterator[bytes]:
            yield b'%b,"data":[' % head[:-1]
            for index, values in enumerate(embeddings):
                yield b'%b{"object":"embedding","index":%d,' % (b"," if index else b"", index)
                if body.return_token_ids:
                    yield b'"prompt_token_ids":%b,' % integers_to_json(pooled.generations[index].prompt)
                yield b'"embedding":%b}' % (_base64(values) if body.encoding_format == "base64" else _numbers(values))
            yield b'],"usage":%b}' % to_json(pooled.usage)

        return await in_slices(pieces())


def _base64(values: bytes) -> bytes:
    return b'"%b"' % base64.b64encode(values)


def _numbers(values: bytes) -> bytes:
    return list_to_json(floats(values), float)
