"""Promise 1 for embeddings: a prompt's embedding depends on its tokens, and on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.base.pooling import Pooling, PoolingKind
from tests.property.model.tiny_models import Fields, make_decoder, model_configs
from tests.support.backends import INSTRUCTION_SETS, native
from tests.support.depth import IS_FULL
from tests.support.pooled import pooled_by_a_worker

_PROMPTS = st.lists(st.lists(st.integers(0, 96), min_size=1, max_size=70), min_size=1, max_size=3)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS if IS_FULL else INSTRUCTION_SETS[:1])
@settings(max_examples=60 if IS_FULL else 12, deadline=None)
@given(
    fields=model_configs(),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    kind=st.sampled_from(PoolingKind),
    dimensions=st.sampled_from([0, 7]),
    prompts=_PROMPTS,
    others=_PROMPTS,
    step_tokens=st.integers(1, 150),
    num_cached=st.integers(0, 69),
)
def test_embeddings_keep_their_bits_in_any_chunks_and_any_company_cached_or_not(
    instruction_set: str,
    fields: Fields,
    dtype: torch.dtype,
    kind: PoolingKind,
    dimensions: int,
    prompts: list[list[int]],
    others: list[list[int]],
    step_tokens: int,
    num_cached: int,
) -> None:
    decoder = make_decoder(fields, native(instruction_set), dtype, seed=1)
    pooling = Pooling(kind=kind, dimensions=dimensions)
    alone = [pooled_by_a_worker(decoder, [prompt], pooling, step_tokens=100)[0] for prompt in prompts]
    heads = [prompt[:num_cached] for prompt in prompts if prompt[:num_cached]]
    crowded = pooled_by_a_worker(decoder, prompts, pooling, step_tokens=step_tokens, others=others, cached=heads)
    assert crowded == alone
    assert {len(each) for each in alone} == {4 * (dimensions or decoder.config.hidden_size)}
