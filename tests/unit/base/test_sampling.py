"""Sampling parameters that some device could not sample with are refused, from clients and routers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pdserve.base.errors import RequestError
from pdserve.base.sampling import MAX_TOP_K, SamplingParams, check_sampling

VOCAB = 97
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
OUTSIDE: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", 129),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("top_k", -1),
    ("top_k", MAX_TOP_K + 1),
    ("min_p", 1.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 11.0),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("logprobs", 21),
    ("max_tokens", 0),
    ("logit_bias", {1: math.inf}),
    ("logit_bias", {1: -math.inf}),
    ("logit_bias", {1: math.nan}),
    ("logit_bias", {1: 100.5}),
    ("logit_bias", {VOCAB: 1.0}),
    ("logit_bias", dict.fromkeys(range(301), 1.0)),
    ("stop_token_ids", (VOCAB,)),
    ("stop_token_ids", (1,) * 65),
    ("allowed_token_ids", (1, VOCAB)),
    ("allowed_token_ids", (1,) * 16_385),
    ("logprob_token_ids", (VOCAB,)),
    ("logprob_token_ids", (1,) * 129),
    ("bad_words", ((1, VOCAB),)),
    ("bad_words", ((1,), ())),
    ("bad_words", ((1, 2),) * 257),
    ("bad_words", ((1,) * 16_385,)),
    *((name, value) for name in NUMBERS for value in (math.nan, math.inf, -math.inf)),
]


@pytest.mark.parametrize(("name", "value"), OUTSIDE, ids=str)
def test_a_parameter_outside_of_its_range_is_refused_by_name(name: str, value: object) -> None:
    changes: dict[str, Any] = {name: value}
    with pytest.raises(RequestError, match=name) as refused:
        check_sampling(replace(SamplingParams(), **changes), VOCAB)
    assert refused.value.param == name


def test_parameters_at_the_ends_of_their_ranges_are_accepted() -> None:
    lowest = SamplingParams(
        temperature=0.0,
        top_p=0.0,
        repetition_penalty=0.01,
        presence_penalty=-2.0,
        frequency_penalty=-2.0,
        logit_bias={0: -100.0},
        max_tokens=1,
    )
    highest = SamplingParams(
        temperature=2.0,
        top_k=MAX_TOP_K,
        min_p=1.0,
        repetition_penalty=10.0,
        presence_penalty=2.0,
        frequency_penalty=2.0,
        logit_bias={VOCAB - 1: 100.0},
        stop_token_ids=(VOCAB - 1,),
        max_tokens=2**32 - 1,
        logprobs=20,
        n=128,
    )
    check_sampling(lowest, VOCAB)
    check_sampling(highest, VOCAB)
