"""What a router takes of a worker's scores: a gap, a surplus or no number ends the attempt, not the router."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.base.errors import TransferError
from pdserve.base.sampling import SamplingParams, TokenLogprobs
from pdserve.v1 import common_pb2, prefill_pb2
from router_svc.request.scoring import Scoring


def scoring(num_prompt: int = 6) -> Scoring:
    generation = SimpleNamespace(
        prompt=range(num_prompt), prompt_logprobs=1, sampling=SamplingParams(logprob_token_ids=(7,))
    )
    context: Any = SimpleNamespace(generation=generation)

    async def heartbeat(waits: int) -> None:
        raise AssertionError("it waits for no worker")

    return Scoring(context, heartbeat)


def chunk(first: int, *logprobs: float, top: Sequence[int] = (), top_logprobs: Sequence[float] = ()) -> Any:
    entries = [
        common_pb2.TokenLogprobs(logprob=each, rank=1, top_ids=top, top_logprobs=top_logprobs) for each in logprobs
    ]
    return prefill_pb2.PromptLogprobs(first_index=first, logprobs=entries)


def test_chunks_follow_each_other() -> None:
    scores: list[TokenLogprobs] = []
    for message in (chunk(1, -1.0, -2.0, top=[3, 7], top_logprobs=[-1.0, float("-inf")]), chunk(3, -3.0, -4.0, -5.0)):
        scoring()._take(scores, message)
    assert [each.logprob for each in scores] == [-1.0, -2.0, -3.0, -4.0, -5.0]


@pytest.mark.parametrize(
    "message",
    [
        chunk(0, -1.0),
        chunk(2, -1.0),
        chunk(1, *[-1.0] * 6),
        chunk(1, float("nan")),
        chunk(1, -1.0, top=[1]),
        chunk(1, -1.0, top=[1], top_logprobs=[float("nan")]),
        chunk(1, -1.0, top=[1, 2, 3], top_logprobs=[-1.0] * 3),
    ],
    ids=["before", "gap", "surplus", "nan", "uneven", "nan beside", "more than requested"],
)
def test_what_no_worker_sends_is_an_error_of_the_transfer(message: prefill_pb2.PromptLogprobs) -> None:
    scores: list[TokenLogprobs] = []
    with pytest.raises(TransferError):
        scoring()._take(scores, message)
    assert scores == []
