"""The answers of embeddings, scores and ranks as types: handlers build them, and the OpenAPI document shows them."""

from __future__ import annotations

from typing import Literal, NotRequired

# Python 3.11 has one that pydantic cannot read.
from typing_extensions import TypedDict


class PoolingUsage(TypedDict):
    """Tokens of a request, over all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(TypedDict):
    """The embedding of an input. With `base64`, its numbers are little-endian float32."""

    object: Literal["embedding"]
    index: int
    prompt_token_ids: NotRequired[list[int]]
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    """The answer of `POST /v1/embeddings`, in the order of the inputs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingAnswer]
    usage: PoolingUsage


class ScoreAnswer(TypedDict):
    """The cosine of the embeddings of two texts."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(TypedDict):
    """The answer of `POST /v1/score`, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreAnswer]
    usage: PoolingUsage


class RankedDocument(TypedDict):
    """The text of a document."""

    text: str


class RankAnswer(TypedDict):
    """A document by its index in the request. Its score is the cosine of its embedding and that of the query."""

    index: int
    document: NotRequired[RankedDocument]
    relevance_score: float


class RankList(TypedDict):
    """The answer of `POST /v1/rerank`, the best document first."""

    id: str
    model: str
    results: list[RankAnswer]
    usage: PoolingUsage
