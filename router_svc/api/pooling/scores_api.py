"""/v1/score and /v1/rerank: how close texts are, by the cosine of their embeddings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from aiohttp import web

from pdserve.base.errors import RequestError
from pdserve.base.pooling import Pooling
from pdserve.base.vectors import cosine, floats
from router_svc.api.generations import Endpoint
from router_svc.api.ids import Ids
from router_svc.api.json_pieces import text_to_json, to_json
from router_svc.api.openai.schema import MAX_PROMPTS
from router_svc.api.openai.shapes import in_slices
from router_svc.api.pooling.pooled import (
    Answer,
    PooledRequest,
    Pooler,
    pooled_prompts,
    pooled_request,
    require_few_numbers,
)
from router_svc.api.pooling.schema import PoolingBody, RerankBody, ScoreBody
from router_svc.api.responder import Responder
from router_svc.request.open_requests import OpenRequest

_SCORE = Endpoint(name="/v1/score", prompt_param="text_2")
_RERANK = Endpoint(name="/v1/rerank", prompt_param="documents")


class ScoresApi:
    """/v1/score and /v1/rerank."""

    def __init__(self, responder: Responder) -> None:
        self._pooler = Pooler(responder)

    def routes(self) -> list[web.RouteDef]:
        """The endpoints for the application."""
        return [web.post("/v1/score", self._score), web.post("/v1/rerank", self._rerank)]

    async def _score(self, request: web.Request) -> web.StreamResponse:
        async def render(opened: OpenRequest, ids: Ids) -> tuple[PooledRequest, Answer]:
            body = await self._pooler.responder.read(request, ScoreBody, opened)
            if len(body.text_1) not in (1, len(body.text_2)):
                raise RequestError(
                    f"`text_1` has {len(body.text_1)} texts and `text_2` {len(body.text_2)}. Send one text in "
                    "`text_1`, or as many as in `text_2`.",
                    param="text_1",
                )
            texts = {"text_1": body.text_1, "text_2": body.text_2}
            return await self._request(request, body, texts, _SCORE, ids), partial(self._scores, len(body.text_1))

        return await self._pooler.respond(request, "score-", render)

    async def _rerank(self, request: web.Request) -> web.StreamResponse:
        async def render(opened: OpenRequest, ids: Ids) -> tuple[PooledRequest, Answer]:
            body = await self._pooler.responder.read(request, RerankBody, opened)
            texts = {"query": [body.query], "documents": [document.text for document in body.documents]}
            return await self._request(request, body, texts, _RERANK, ids), partial(self._ranks, body)

        return await self._pooler.respond(request, "rerank-", render)

    async def _request(
        self, request: web.Request, body: PoolingBody, texts: dict[str, list[str]], endpoint: Endpoint, ids: Ids
    ) -> PooledRequest:
        """The texts of all fields, one after the other. Raises `RequestError`."""
        if (count := sum(map(len, texts.values()))) > MAX_PROMPTS:
            raise RequestError(
                f"`{'` and `'.join(texts)}` have {count} texts, more than {MAX_PROMPTS}. Split the request.",
                param=endpoint.prompt_param,
            )
        chosen = self._pooler.responder.backend(request, body.model)
        own = chosen.model.pooling
        pooling = Pooling(kind=own.kind_for(body.pooling), dimensions=own.dimensions)
        prompts = [ids for name, each in texts.items() for ids in await pooled_prompts(body, chosen, each, param=name)]
        require_few_numbers(len(prompts), pooling.dimensions, param=endpoint.prompt_param)
        return await pooled_request(body, chosen, prompts, pooling, endpoint, ids)

    async def _scores(self, num_first: int, pooled: PooledRequest, embeddings: Sequence[bytes]) -> bytes:
        cosines = await self._cosines(embeddings[:num_first], embeddings[num_first:])
        data = [{"index": index, "object": "score", "score": cosine} for index, cosine in enumerate(cosines)]
        head = {"id": pooled.response_id, "object": "list", "created": pooled.created, "model": pooled.backend.name}
        return to_json({**head, "data": data, "usage": pooled.usage})

    async def _ranks(self, body: RerankBody, pooled: PooledRequest, embeddings: Sequence[bytes]) -> bytes:
        cosines = await self._cosines(embeddings[:1], embeddings[1:])
        ranked = sorted(range(len(cosines)), key=lambda index: -cosines[index])[: body.top_n]
        head = to_json({"id": pooled.response_id, "model": pooled.backend.name})

        def pieces() -> Iterator[bytes]:
            yield b'%b,"results":[' % head[:-1]
            for rank, index in enumerate(ranked):
                yield b'%b{"index":%d,' % (b"," if rank else b"", index)
                if body.return_documents is not False:
                    yield b'"document":{"text":%b},' % text_to_json(body.documents[index].text)
                yield b'"relevance_score":%b}' % to_json(cosines[index])
            yield b'],"usage":%b}' % to_json(pooled.usage)

        return await in_slices(pieces())

    async def _cosines(self, firsts: Sequence[bytes], seconds: Sequence[bytes]) -> list[float]:
        """The cosine of each pair. If `firsts` has a single embedding, all pairs have it."""

        def work() -> list[float]:
            left = [floats(each) for each in firsts] * (len(seconds) // len(firsts))
            return [cosine(a, floats(b)) for a, b in zip(left, seconds, strict=True)]

        return await self._pooler.responder.intake.threads.run(sum(map(len, seconds)) // 4, work)
