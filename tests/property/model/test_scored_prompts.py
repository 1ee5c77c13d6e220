"""Promise 1 for prompts: a token's log-probability depends on the tokens before it, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.model.tiny_models import Fields, make_decoder, model_configs
from tests.support.backends import INSTRUCTION_SETS, native
from tests.support.depth import IS_FULL
from tests.support.scoring import scored_by_a_worker

_PROMPTS = st.lists(st.lists(st.integers(0, 96), min_size=1, max_size=70), min_size=1, max_size=3)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS if IS_FULL else INSTRUCTION_SETS[:1])
@settings(max_examples=60 if IS_FULL else 12, deadline=None)
@given(
    fields=model_configs(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    prompts=_PROMPTS,
    others=_PROMPTS,
    steps=st.tuples(st.integers(1, 150), st.integers(1, 50)),
)
def test_scores_keep_their_bits_in_any_chunks_and_any_company(
    instruction_set: str,
    fields: Fields,
    dtype: torch.dtype,
    prompts: list[list[int]],
    others: list[list[int]],
    steps: tuple[int, int],
) -> None:
    decoder = make_decoder(fields, native(instruction_set), dtype, seed=1)
    alone = [
        scored_by_a_worker(decoder, [prompt], step_tokens=100, scored_tokens=100, alternatives=2)[0]
        for prompt in prompts
    ]
    crowded = scored_by_a_worker(
        decoder, prompts, step_tokens=steps[0], scored_tokens=steps[1], alternatives=2, unscored=others
    )
    assert crowded == alone
    assert [len(each) for each in alone] == [len(prompt) - 1 for prompt in prompts]
