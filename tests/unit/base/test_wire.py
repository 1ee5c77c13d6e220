"""Values survive a round trip over the wire."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.base.errors import TransferError
from pdserve.base.sampling import ChoiceTokens, FinishReason, SamplingParams, ThinkingBudget, TokenLogprobs
from pdserve.base.wire import reported_wait, sampling_from_wire, sampling_to_wire, tokens_from_wire, tokens_to_wire
from pdserve.v1 import common_pb2 as pb

ids = st.integers(0, 2**32 - 1)
reals = st.floats(allow_nan=False, allow_infinity=False, width=32)

sampling = st.builds(
    SamplingParams,
    temperature=reals,
    top_p=reals,
    top_k=ids,
    min_p=reals,
    repetition_penalty=reals,
    presence_penalty=reals,
    frequency_penalty=reals,
    logit_bias=st.dictionaries(ids, reals, max_size=3),
    stop_token_ids=st.lists(ids, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    min_tokens=ids,
    max_tokens=ids,
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    n=st.integers(1, 128),
    grammar=st.text(max_size=5),
    allowed_token_ids=st.lists(ids, max_size=3).map(tuple),
    logprob_token_ids=st.lists(ids, max_size=3).map(tuple),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    thinking=st.none()
    | st.builds(
        ThinkingBudget,
        max_tokens=ids,
        is_open=st.booleans(),
        opening=st.text(max_size=3),
        closings=st.lists(st.text(max_size=3), max_size=2).map(tuple),
        closing_token_ids=st.lists(ids, max_size=3).map(tuple),
    ),
)


@given(sampling)
def test_sampling_parameters_survive_a_round_trip(params: SamplingParams) -> None:
    assert sampling_from_wire(pb.SamplingParams.FromString(sampling_to_wire(params).SerializeToString())) == params


@given(
    st.lists(ids, max_size=4).map(tuple),
    st.lists(
        st.builds(
            TokenLogprobs, logprob=reals, rank=ids, top_ids=st.just((1, 2)), top_logprobs=st.just((0.0, -math.inf))
        )
    ).map(tuple),
    st.sampled_from([None, *FinishReason]),
    st.none() | ids,
)
def test_tokens_survive_a_round_trip(
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprobs, ...],
    finish_reason: FinishReason | None,
    stop_token_id: int | None,
) -> None:
    tokens = ChoiceTokens(
        choice_index=3,
        first_index=9,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=finish_reason,
        stop_token_id=stop_token_id,
    )
    assert tokens_from_wire(pb.ChoiceTokens.FromString(tokens_to_wire(tokens).SerializeToString())) == tokens


def test_an_unknown_finish_reason_is_a_failed_transfer() -> None:
    with pytest.raises(TransferError, match="finish reason 77"):
        tokens_from_wire(pb.ChoiceTokens(finish_reason=77))  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0, 1e9, "", "x", "nan"])
def test_a_wait_that_is_none_becomes_a_second(seconds: float | str) -> None:
    assert reported_wait(seconds) == 1.0


def test_a_wait_that_another_process_reports_is_taken() -> None:
    assert (reported_wait("2.5"), reported_wait(0.0)) == (2.5, 0.0)
