"""The KV cache gets what is left of a GPU, and a model that does not fit is refused in one message with the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.worker.load.device_kv_budget import DeviceUse, plan_device_kv
from pdserve.worker.load.kv_budget import KvBudget

GIB = 1024**3
#: Llama-3.1-8B: 2 MiB a block.
LAYOUT = KvLayout(model="m", dtype="bfloat16", block_size=16, num_layers=32, num_kv_heads=8, head_dim=128)
USE = DeviceUse(total=80 * GIB, free=79 * GIB, weights=15 * GIB, activations=2 * GIB)


def plan(use: DeviceUse = USE, *, share: float = 0.9, memory: int | None = None, length: int | None = None) -> KvBudget:
    return plan_device_kv(
        LAYOUT, use, utilization=share, kv_cache_memory=memory, wanted_model_len=length, model_limit=131_072
    )


def test_what_is_left_of_the_share_becomes_kv() -> None:
    # 72 GiB, of which 17 are used and 1.44 kept free.
    assert plan().num_blocks == int((72 - 17 - 1.44) * GIB) // LAYOUT.block_bytes == 27_422
    assert plan().max_model_len == 131_072


def test_two_workers_that_share_a_gpu_take_no_more_than_there_is() -> None:
    first = plan(share=0.45)
    taken = USE.weights + USE.activations + first.num_blocks * LAYOUT.block_bytes
    second = plan(replace(USE, free=USE.free - taken), share=0.45)
    assert taken + USE.weights + USE.activations + second.num_blocks * LAYOUT.block_bytes < 0.9 * USE.total


def test_a_cache_of_a_size_that_was_asked_for_has_that_size() -> None:
    assert plan(memory=4 * GIB).num_blocks == 2048


@pytest.mark.parametrize(
    ("use", "share", "memory", "length", "needles"),
    [
        (replace(USE, free=40 * GIB), 0.9, None, None, ["72.00 GiB", "only 40.00 GiB were free", "at most 0.5"]),
        (replace(USE, weights=71 * GIB), 0.9, None, None, ["72.00 GiB", "weights 71.00 GiB", "2.00 GiB", "2.00 MiB"]),
        (
            USE,
            0.9,
            60 * GIB,
            None,
            ["60.00 GiB does not fit", "weights 15.00 GiB", "53.56 GiB are left", "438752 tokens"],
        ),
        (USE, 0.9, GIB, 100_000, ["--max-model-len 100000 needs", "8192 tokens"]),
        (USE, 0.9, None, 200_000, ["exceeds the model's own limit"]),
    ],
)
def test_what_does_not_fit_is_refused_with_all_numbers(
    use: DeviceUse, share: float, memory: int | None, length: int | None, needles: list[str]
) -> None:
    with pytest.raises(SetupError) as refusal:
        plan(use, share=share, memory=memory, length=length)
    for needle in needles:
        assert needle in str(refusal.value)


def test_a_stage_in_gpu_memory_is_part_of_the_workers_share() -> None:
    def plan_with(staging: int) -> KvBudget:
        return plan_device_kv(
            LAYOUT, USE, utilization=0.9, kv_cache_memory=None, wanted_model_len=None, model_limit=8192, staging=staging
        )

    assert plan_with(0).num_blocks - plan_with(GIB).num_blocks == GIB // LAYOUT.block_bytes
    with pytest.raises(SetupError, match=r"activations of the largest step 2\.00 GiB, staging memory 60\.00 GiB"):
        plan_with(60 * GIB)


def test_what_ranks_take_to_exchange_parts_is_no_kv() -> None:
    assert plan(replace(USE, group=GIB)).num_blocks == plan().num_blocks - 512
    with pytest.raises(SetupError, match=r"exchange between ranks 1\.00 GiB, one KV block"):
        plan(replace(USE, weights=70 * GIB, group=GIB))


def test_a_size_that_was_asked_for_is_that_of_all_ranks_together() -> None:
    def of_two(memory: int) -> KvBudget:
        return plan_device_kv(
            LAYOUT,
            USE,
            utilization=0.9,
            kv_cache_memory=memory,
            num_ranks=2,
            wanted_model_len=None,
            model_limit=131_072,
        )

    assert of_two(8 * GIB) == plan(memory=4 * GIB)
    with pytest.raises(SetupError, match=r"120\.00 GiB, a rank's part of which is 60\.00 GiB, does not fit"):
        of_two(120 * GIB)
