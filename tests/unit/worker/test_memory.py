"""The KV cache is sized from what was asked and what there is, and refusals carry the numbers."""

from __future__ import annotations

import pytest

from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.worker.memory import plan_kv

LAYOUT = KvLayout(model="m", dtype="bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
MIB = 1024**2


def test_a_block_of_the_default_model_has_368640_bytes() -> None:
    assert LAYOUT.block_bytes == 368_640


def test_the_cache_holds_as_many_blocks_as_fit() -> None:
    budget = plan_kv(LAYOUT, kv_cache_memory=100 * MIB, wanted_model_len=None, model_limit=2048)
    assert (budget.num_blocks, budget.max_model_len) == (100 * MIB // 368_640, 2048)


def test_a_small_cache_lowers_the_models_limit() -> None:
    budget = plan_kv(LAYOUT, kv_cache_memory=10 * 368_640, wanted_model_len=None, model_limit=8192)
    assert (budget.num_blocks, budget.max_model_len) == (10, 160)


@pytest.mark.parametrize(
    ("memory", "wanted", "needle"),
    [
        (1000, None, "cannot hold one block of 16 tokens"),
        (2**60, None, "does not fit into"),
        (100 * MIB, 9000, "exceeds the model's own limit of 8192"),
        (10 * 368_640, 161, "is 160 tokens"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(memory: int, wanted: int | None, needle: str) -> None:
    with pytest.raises(SetupError, match=needle):
        plan_kv(LAYOUT, kv_cache_memory=memory, wanted_model_len=wanted, model_limit=8192)
