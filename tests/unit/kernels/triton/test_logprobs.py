"""Log-probabilities, ranks and alternatives against the engine's sampler."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.devices import DEVICE, needs_triton

# isort: split
from kernels.triton.sampling import sample
from pdserve.base.sampling import SamplingParams
from pdserve.engine.sequence import Sampled
from tests.unit.engine.fakes import row
from tests.unit.kernels.triton.sampled import reference, sample_rows

pytestmark = [needs_triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize(("vocab", "scale"), [(1, 1.0), (7, 1.0), (1000, 0.0), (1000, 30.0), (5000, 1.0)])
def test_log_probabilities_match_the_reference(vocab: int, scale: float) -> None:
    wanted = [None, 0, 3, 8]
    rows = [
        row(SamplingParams(seed=index, logprobs=count, logit_bias={vocab // 3: 2.0}))
        for index, count in enumerate(wanted)
    ]
    # Rounded, so that many logits are equal.
    logits = (torch.randn(len(rows), vocab, generator=torch.Generator().manual_seed(4)) * scale).round(decimals=1)
    sampled = sample(logits.to(DEVICE), sample_rows(rows, list(range(len(rows)))), max_logprobs=8)
    logprobs = sampled.logprobs
    assert logprobs is not None
    for index, expected in enumerate(reference(logits, rows)):
        assert isinstance(expected, Sampled)
        assert sampled.token_ids[index] == expected.token_id
        top_ids, top_logprobs = logprobs.top_ids[index].tolist(), logprobs.top_logprobs[index].tolist()
        if expected.logprobs is None:
            assert (logprobs.rank[index], top_ids) == (0, [-1] * 8)
            assert math.isnan(logprobs.logprob[index])
            continue
        count = len(expected.logprobs.top_ids)
        assert logprobs.rank[index] == expected.logprobs.rank
        assert logprobs.logprob[index].item() == pytest.approx(expected.logprobs.logprob, abs=1e-5, rel=1e-6)
        assert top_ids == [*expected.logprobs.top_ids, *[-1] * (8 - count)]
        assert top_logprobs[:count] == pytest.approx(expected.logprobs.top_logprobs, abs=1e-5, rel=1e-6)
        assert all(math.isnan(value) for value in top_logprobs[count:])


def test_alternatives_include_tokens_without_probability_and_stop_at_the_limit() -> None:
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 1.0, -0.0, 0.0]])
    sampled = sample(
        logits.to(DEVICE), sample_rows([row(SamplingParams(temperature=0.0, logprobs=20))], [0]), max_logprobs=5
    )
    assert sampled.logprobs is not None
    assert sampled.logprobs.top_ids.tolist() == [[1, 3, 4, 5, 0]]
    assert sampled.logprobs.top_logprobs[0, 4] == -math.inf


def test_a_row_that_failed_has_no_log_probabilities() -> None:
    logits = torch.tensor([[math.nan, 1.0]])
    sampled = sample(logits.to(DEVICE), sample_rows([row(SamplingParams(logprobs=1))], [0]), max_logprobs=1)
    assert sampled.token_ids.tolist() == [-1]
    assert sampled.logprobs is not None
    assert math.isnan(sampled.logprobs.logprob[0])
    assert sampled.logprobs.top_ids.tolist() == [[-1]]
