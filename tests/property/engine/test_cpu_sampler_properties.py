"""The C++ sampler returns what the sampler in numpy returns, with every instruction set and number of threads."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdserve.base.sampling import SamplingParams
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import SampleRow
from tests.unit.engine.cpu_sampling import cpu_sampler
from tests.unit.engine.fakes import row
from tests.unit.engine.random_grammar import RandomGrammar, with_grammar, with_rules
from tests.unit.kernels.cpu_ops import INSTRUCTION_SETS, needs_kernels

pytestmark = needs_kernels

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-300, 1e-12, 0.01, 0.2, 0.7, 1.0, 1.0, 1.7, 2.0]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.999, 0.01, 0.0]),
    top_k=st.sampled_from([0, 0, 0, 1, 5, 40, 1200, 99_999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.0, -0.4]),
    logit_bias=st.sampled_from([{}, {}, {}, {4: 2.5, 0: -3.0}]),
    min_tokens=st.sampled_from([0, 0, 0, 5]),
    logprobs=st.sampled_from([None, None, 0, 7, 20]),
    logprob_token_ids=st.sampled_from([(), (), (4,), (3, 0, 2)]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
rows = st.builds(
    row,
    params,
    position=st.integers(6, 9000),
    choice=st.integers(0, 127),
    output=st.lists(st.integers(0, 4), max_size=6),
)


def table(num_rows: int, vocab_size: int, seed: int, scale: float, *, rounded: bool) -> Tensor:
    """Logits; rounded ones have many ties. Some rows have masked tokens."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    if rounded:
        logits = (logits * 4).round() / 4
    logits[::3, 1 : 1 + vocab_size // 2] = -math.inf
    return logits


@settings(max_examples=60)
@given(
    batch=st.lists(rows, min_size=1, max_size=12),
    vocab_size=st.sampled_from([5, 15, 17, 64, 1537, 6000]),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 1e-6, 0.01, 0.5, 2.0, 8.0, 40.0, 1e30]),
    rounded=st.booleans(),
    bad=st.sampled_from([None, None, None, math.nan, math.inf, -math.inf]),
    num_threads=st.sampled_from([1, 2]),
    shares=st.lists(st.sampled_from([None, None, 0.0, 0.01, 0.5, 1.0]), min_size=12, max_size=12),
    have_rules=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_every_instruction_set_gives_the_results_of_the_sampler_in_numpy(
    batch: list[SampleRow],
    vocab_size: int,
    seed: int,
    scale: float,
    rounded: bool,
    bad: float | None,
    num_threads: int,
    shares: list[float | None],
    have_rules: list[bool],
) -> None:
    logits = table(len(batch), vocab_size, seed, scale, rounded=rounded)
    batch = [
        with_rules(each, seed, vocab_size) if has_rules else each
        for each, has_rules in zip(batch, have_rules, strict=False)
    ]
    batch = [
        each
        if share is None or (bad is not None and not share)
        else with_grammar(each, RandomGrammar(seed, vocab_size, share))
        for each, share in zip(batch, shares, strict=False)
    ]
    if bad is not None:
        logits[0, seed % vocab_size] = bad
    logits_rows = [index * seed % len(batch) for index in range(len(batch))]
    expected = Sampler().sample(logits, batch, logits_rows)
    for isa in INSTRUCTION_SETS:
        assert SAMPLERS[isa, num_threads].sample(logits, batch, logits_rows) == expected


@settings(max_examples=15)
@given(
    vocab_size=st.sampled_from([16, 37, 700]),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 0.3, 1.0]),
    rounded=st.booleans(),
    truncation=st.sampled_from([{"top_p": 0.5}, {"top_p": 0.93}, {"top_k": 9}, {"min_p": 0.4}]),
)
def test_exactly_the_same_tokens_are_kept(
    vocab_size: int, seed: int, scale: float, rounded: bool, truncation: dict[str, Any]
) -> None:
    """Many draws from one row find the tokens next to the end of the head; fails with a `top_p` that is 2 % less."""
    logits = table(2, vocab_size, seed, scale, rounded=rounded)[1:]
    batch = [row(replace(SamplingParams(seed=seed, temperature=2.0), **truncation), position=i) for i in range(150)]
    expected = Sampler().sample(logits, batch, [0] * len(batch))
    for isa in INSTRUCTION_SETS:
        assert SAMPLERS[isa, 1].sample(logits, batch, [0] * len(batch)) == expected


SAMPLERS = {(isa, count): cpu_sampler(isa, count) for isa in INSTRUCTION_SETS for count in (1, 2)}
