"""A row's token does not depend on other rows, and truncation agrees with its definition."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.base.sampling import SamplingParams
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import Sampled, SampleRow
from tests.unit.engine.fakes import row

VOCAB = 1537  # Larger than any head, and not a multiple of a vector width.

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 0.7, 1.0, 1.9]),
    top_p=st.sampled_from([1.0, 0.3, 0.95, 0.999]),
    top_k=st.sampled_from([0, 0, 1, 40, 1200, 5000]),
    min_p=st.sampled_from([0.0, 0.0, 0.02]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.4]),
    logit_bias=st.sampled_from([{}, {}, {5: 2.5, 1400: -3.0}]),
    logprobs=st.sampled_from([None, 0, 7]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
rows = st.builds(
    row,
    params,
    position=st.integers(0, 9000),
    choice=st.integers(0, 127),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=12),
)


@settings(max_examples=20)
@given(
    batch=st.lists(rows, min_size=1, max_size=20), seed=st.integers(0, 2**31), scale=st.sampled_from([0.01, 1.0, 6.0])
)
def test_a_row_gets_the_same_bits_alone_and_among_others(batch: list[SampleRow], seed: int, scale: float) -> None:
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed)) * scale
    together = Sampler().sample(logits, batch, range(len(batch)))
    alone = [Sampler().sample(logits[i : i + 1], [batch[i]], [0])[0] for i in range(len(batch))]
    assert together == alone


@settings(max_examples=40)
@given(
    logits=st.lists(st.sampled_from([-9.0, -1.5, 0.0, 0.25, 0.5, 1.0, 2.0, 4.0]), min_size=1, max_size=40),
    top_k=st.integers(0, 45),
    top_p=st.sampled_from([0.05, 0.37, 0.62, 0.913, 1.0]),
    min_p=st.sampled_from([0.0, 0.021, 0.3, 0.77]),
)
def test_every_sampled_token_is_one_that_the_definition_keeps(
    logits: list[float], top_k: int, top_p: float, min_p: float
) -> None:
    kept = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: top_k or len(logits)]
    kept = [token for token in kept if math.exp(logits[token] - max(logits)) >= min_p]
    total = sum(math.exp(logits[token]) for token in kept)
    nucleus: list[int] = []
    for token in kept:
        if nucleus and sum(math.exp(logits[other]) for other in nucleus) >= top_p * total * (1 + 1e-6):
            break
        nucleus.append(token)
    count = 64
    chosen = Sampler().sample(
        torch.tensor([logits]).repeat(count, 1),
        [row(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, seed=4), position=i) for i in range(count)],
        range(count),
    )
    ids = {result.token_id for result in chosen if isinstance(result, Sampled)}
    assert ids <= {*nucleus}
    if len(nucleus) > 1 and math.exp(logits[nucleus[0]] - logits[nucleus[1]]) < 2:
        assert len(ids) > 1


@pytest.mark.parametrize("num_threads", [1, 2])
def test_the_number_of_compute_threads_changes_no_bit(num_threads: int) -> None:
    batch = [row(SamplingParams(seed=i, top_p=0.9 if i % 2 else 1.0, logprobs=5), position=i) for i in range(20)]
    logits = torch.randn(20, 50_000, generator=torch.Generator().manual_seed(3)) * 4
    previous = torch.get_num_threads()
    expected = [Sampler().sample(logits[i : i + 1], [batch[i]], [0])[0] for i in range(20)]
    torch.set_num_threads(num_threads)
    try:
        assert Sampler().sample(logits, batch, range(20)) == expected
    finally:
        torch.set_num_threads(previous)
