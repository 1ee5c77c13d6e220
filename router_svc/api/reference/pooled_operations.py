"""The endpoints for which only prefill workers compute, with what they take and how they answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router_svc.api.body import Body
from router_svc.api.decisions.answers import DecisionList
from router_svc.api.decisions.schema import DecisionBody
from router_svc.api.pooling.answers import EmbeddingList, RankList, ScoreList
from router_svc.api.pooling.schema import EmbeddingBody, RerankBody, ScoreBody
from router_svc.api.reference.operation import GENERATION_ERRORS, Answer, Operation
from router_svc.api.reference.parameters import GENERATION, RATE_LIMITS


def _pooled(summary: str, body: type[Body], text: str, schema: Any, tag: str = "Embeddings") -> Operation:
    return Operation(
        tag=tag,
        summary=summary,
        body=body,
        answers={200: Answer(text=text, schema=schema, headers=("X-Request-Id", *RATE_LIMITS))},
        parameters=GENERATION,
        errors=GENERATION_ERRORS,
    )


POOLED_OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/v1/embeddings"): _pooled(
        "Embeddings of one or several texts",
        EmbeddingBody,
        "The embeddings, in the order of the inputs.",
        EmbeddingList,
    ),
    ("POST", "/v1/score"): _pooled(
        "How close one text is to others, or each of some texts to another one",
        ScoreBody,
        "The scores in the order of pairs.",
        ScoreList,
    ),
    ("POST", "/v1/rerank"): _pooled(
        "Documents in the order of their closeness to a query", RerankBody, "The best documents.", RankList
    ),
    ("POST", "/v1/decisions"): _pooled(
        "Probabilities of the possible answers to questions about an input",
        DecisionBody,
        "The answers, in the order of the questions.",
        DecisionList,
        tag="Generation",
    ),
}
