"""Rows with any parameters that `SequenceLimits.check` accepts can be sampled on the host and prepared for a device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdserve.base.errors import RequestError
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.device_rows import constant_fields
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import Sampled, SampleRow, Sequence
from pdserve.engine.sequence_limits import SequenceLimits

VOCAB = 64
LIMITS = SequenceLimits(max_model_len=32, vocab_size=VOCAB, eos_token_ids=frozenset({3}))
LOGITS = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1)) * 4

plain = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 5e-324, 0.7, 2.0]),
    top_p=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 2**31 - 1]),
    min_p=st.sampled_from([0.0, 1.0]),
    repetition_penalty=st.sampled_from([0.01, 1.0, 10.0]),
    presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
    logit_bias=st.sampled_from([{}, {5: -100.0, 6: 100.0}]),
    min_tokens=st.sampled_from([0, 1, 2**32 - 1]),
    seed=st.integers(-(2**63), 2**63 - 1),
    allowed_token_ids=st.sampled_from([(), (7, 9, 11, 12, VOCAB - 1)]),
    bad_words=st.sampled_from([(), ((7,), (9, 7))]),
    logprobs=st.sampled_from([None, 0, 20]),
)
tokens = st.integers(0, 2**32 - 1) | st.integers(0, VOCAB)
numbers = st.floats() | st.sampled_from([float("inf"), float("-inf"), float("nan"), 1e300, 0.0])
#: What a peer can put into each field of the message.
anything: dict[str, st.SearchStrategy[Any]] = {
    "temperature": numbers,
    "top_p": numbers,
    "top_k": st.integers(0, 2**32 - 1),
    "min_p": numbers,
    "repetition_penalty": numbers,
    "presence_penalty": numbers,
    "frequency_penalty": numbers,
    "logit_bias": st.dictionaries(st.integers(0, 2**32 - 1) | st.integers(0, VOCAB), numbers, max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple),
    # With one token that is always left: routers refuse a request without any.
    "allowed_token_ids": st.lists(tokens, max_size=3).map(lambda ids: (*ids, 11)),
    "bad_words": st.lists(st.lists(tokens, max_size=3).map(tuple), max_size=3).map(tuple),
    "max_tokens": st.integers(0, 2**32 - 1),
    "logprobs": st.integers(0, 2**32 - 1),
    "logprob_token_ids": st.lists(tokens, max_size=3).map(tuple),
    "n": st.integers(0, 2**32 - 1),
}


@st.composite
def accepted_rows(draw: st.DrawFn) -> SampleRow:
    name = draw(st.sampled_from(sorted(anything)))
    changes: dict[str, Any] = {name: draw(anything[name])}
    params = replace(draw(plain), **changes)
    sequence = Sequence.from_prompt(RequestId("r"), [1, 2, 2], params, hash_key=bytes(32))
    try:
        LIMITS.check(sequence.tokens, params)
    except RequestError:
        assume(False)
    return LIMITS.sample_row(sequence, 0)


@settings(max_examples=100)
@given(row=accepted_rows())
def test_accepted_parameters_give_a_token(row: SampleRow) -> None:
    [result] = Sampler().sample(LOGITS, [row], [0])
    assert isinstance(result, Sampled)


@settings(max_examples=100)
@given(row=accepted_rows())
def test_accepted_parameters_can_be_prepared_for_a_device(row: SampleRow) -> None:
    arrays = constant_fields([row])
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert arrays["top_k"].tolist() == [row.params.top_k]
