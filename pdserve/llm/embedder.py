"""Embeddings of prompts, and scores of pairs of texts, over `/v1/embeddings`."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.base.vectors import cosine, floats
from pdserve.llm.batch import run_each
from pdserve.llm.client import Client
from pdserve.llm.outputs import EmbeddingOutput, EmbeddingRequestOutput, ScoringOutput, ScoringRequestOutput
from pdserve.llm.pooling_params import PoolingParams
from pdserve.llm.prompts import Prompt, PromptType, to_each, to_prompts

OnResult = Callable[[EmbeddingRequestOutput], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A prompt with its parameters."""

    prompt: Prompt
    params: PoolingParams
    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs of texts, each of which is embedded once however many pairs have it."""

    pairs: Sequence[tuple[str, str]]
    requests: Sequence[EmbeddingRequest]


class Embedder:
    """Requests for embeddings of a client."""

    def __init__(self, client: Client, limit: int) -> None:
        """`limit`: requests at a time."""
        self._client = client
        self._limit = limit
        self._run = secrets.token_hex(4)
        self._count = 0

    def requests(
        self, prompts: PromptType | Sequence[PromptType], params: PoolingParams | Sequence[PoolingParams] | None
    ) -> list[EmbeddingRequest]:
        """A request per prompt. Raises `ValueError`."""
        several = to_prompts(prompts)
        given = PoolingParams() if params is None else params
        return [self._request(*each) for each in zip(several, to_each(given, PoolingParams, len(several)), strict=True)]

    def pairs(self, data_1: str | Sequence[str], data_2: str | Sequence[str], params: PoolingParams | None) -> Pairs:
        """Pairs of one text with each of others, or of as many with as many. Raises `ValueError`."""
        firsts, seconds = _texts("data_1", data_1), _texts("data_2", data_2)
        if len(firsts) not in (1, len(seconds)):
            raise ValueError(
                f"`data_1` has {len(firsts)} texts and `data_2` {len(seconds)}. Give one text in `data_1`, or as many "
                "as in `data_2`."
            )
        own = params or PoolingParams()
        own.require_scores()
        pairs = list(zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True))
        texts = dict.fromkeys(text for pair in pairs for text in pair)
        return Pairs(pairs=pairs, requests=[self._request(Prompt(text=text), own) for text in texts])

    async def embed(
        self, requests: Sequence[EmbeddingRequest], on_result: OnResult = lambda _: None
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each request, in their order. Raises the first failure, with its index."""
        return await run_each(self._embed, requests, self._limit, on_result)

    async def score(self, given: Pairs, on_result: OnResult = lambda _: None) -> list[ScoringRequestOutput]:
        """The score of each pair. Raises the first failure, with the index of the first pair that has the text."""
        texts = [request.prompt.text for request in given.requests]
        first_pairs: dict[str | None, int] = {}
        for index, pair in enumerate(given.pairs):
            for text in pair:
                first_pairs.setdefault(text, index)
        indices = [first_pairs[text] for text in texts]
        embedded = await run_each(
            self._embed, given.requests, self._limit, on_result, numbered=(indices, len(given.pairs))
        )
        of_text = dict(zip(texts, embedded, strict=True))
        return [_score(of_text[first], of_text[second]) for first, second in given.pairs]

    def _request(self, prompt: Prompt, params: PoolingParams) -> EmbeddingRequest:
        number, self._count = self._count, self._count + 1
        return EmbeddingRequest(prompt=prompt, params=params, request_id=f"embed-{self._run}-{number}")

    async def _embed(self, request: EmbeddingRequest) -> EmbeddingRequestOutput:
        prompt = request.prompt
        body: dict[str, Any] = {
            "model": self._client.model,
            "input": prompt.text if prompt.token_ids is None else list(prompt.token_ids),
            "encoding_format": "base64",
            "return_token_ids": True,
            **request.params.as_fields(),
        }
        if prompt.cache_salt is not None:
            body["cache_salt"] = prompt.cache_salt
        [data] = (await self._client.post("/v1/embeddings", body, request.request_id))["data"]
        return EmbeddingRequestOutput(
            request_id=request.request_id,
            outputs=EmbeddingOutput(embedding=floats(base64.b64decode(data["embedding"])).tolist()),
            prompt_token_ids=data["prompt_token_ids"],
        )


def _score(first: EmbeddingRequestOutput, second: EmbeddingRequestOutput) -> ScoringRequestOutput:
    return ScoringRequestOutput(
        request_id=second.request_id,
        outputs=ScoringOutput(score=cosine(first.outputs.embedding, second.outputs.embedding)),
        prompt_token_ids=first.prompt_token_ids + second.prompt_token_ids,
    )


def _texts(name: str, given: str | Sequence[str]) -> list[str]:
    texts = [given] if isinstance(given, str) else list(given)
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"`{name}` is a text or a list of at least one text, but not {given!r:.100}.")
    return texts
