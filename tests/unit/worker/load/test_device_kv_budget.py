"""The KV cache gets the rest of a GPU's memory, and a model that does not fit is refused with the numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.worker.load.device_kv_budget import plan_device_kv
from pdserve.worker.load.kv_budget import KvBudget, KvRequest
from pdserve.worker.load.memory_profile import MemoryProfile

GIB = 1024**3
#: Llama-3.1-8B: 2 MiB a block.
LAYOUT = KvLayout.uniform(model="m", dtype="bfloat16", block_size=16, num_layers=32, num_kv_heads=8, head_dim=128)
PROFILE = MemoryProfile(total=80 * GIB, free=79 * GIB, weights=15 * GIB, activations=2 * GIB)


def plan(
    profile: MemoryProfile = PROFILE,
    *,
    share: float = 0.9,
    memory: int | None = None,
    length: int | None = None,
    num_ranks: int = 1,
    staging_bytes: int = 0,
) -> KvBudget:
    request = KvRequest(memory_bytes=memory, max_model_len=length, model_limit=131_072)
    return plan_device_kv(LAYOUT, profile, request, utilization=share, num_ranks=num_ranks, staging_bytes=staging_bytes)


def test_the_rest_of_the_share_becomes_kv() -> None:
    # 72 GiB, of which 17 are in use and 1.44 stay free.
    assert plan().num_blocks == int((72 - 17 - 1.44) * GIB) // LAYOUT.block_bytes == 27_422
    assert plan().max_model_len == 131_072


def test_two_workers_that_share_a_gpu_do_not_exceed_its_memory() -> None:
    first = plan(share=0.45)
    taken = PROFILE.weights + PROFILE.activations + first.num_blocks * LAYOUT.block_bytes
    second = plan(replace(PROFILE, free=PROFILE.free - taken), share=0.45)
    assert taken + PROFILE.weights + PROFILE.activations + second.num_blocks * LAYOUT.block_bytes < 0.9 * PROFILE.total


def test_a_requested_size_is_used_as_it_is() -> None:
    assert plan(memory=4 * GIB).num_blocks == 2048


@pytest.mark.parametrize(
    ("profile", "share", "memory", "length", "needles"),
    [
        (replace(PROFILE, free=40 * GIB), 0.9, None, None, ["72.00 GiB", "only 40.00 GiB were free", "at most 0.5"]),
        (
            replace(PROFILE, weights=71 * GIB),
            0.9,
            None,
            None,
            ["72.00 GiB", "weights 71.00 GiB", "2.00 GiB", "2.00 MiB"],
        ),
        (
            PROFILE,
            0.9,
            60 * GIB,
            None,
            ["60.00 GiB does not fit", "weights 15.00 GiB", "53.56 GiB are left", "438752 tokens"],
        ),
        (PROFILE, 0.9, GIB, 100_000, ["--max-model-len 100000 needs", "8192 tokens"]),
        (PROFILE, 0.9, None, 200_000, ["exceeds the model's own limit"]),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_all_numbers(
    profile: MemoryProfile, share: float, memory: int | None, length: int | None, needles: list[str]
) -> None:
    with pytest.raises(SetupError) as refusal:
        plan(profile, share=share, memory=memory, length=length)
    for needle in needles:
        assert needle in str(refusal.value)


def test_a_stage_in_gpu_memory_counts_against_the_workers_share() -> None:
    assert plan().num_blocks - plan(staging_bytes=GIB).num_blocks == GIB // LAYOUT.block_bytes
    with pytest.raises(SetupError, match=r"activations of the largest step 2\.00 GiB, staging memory 60\.00 GiB"):
        plan(staging_bytes=60 * GIB)


def test_buffers_for_communication_between_ranks_are_not_available_to_kv() -> None:
    assert plan(replace(PROFILE, group=GIB)).num_blocks == plan().num_blocks - 512
    with pytest.raises(SetupError, match=r"communication between ranks 1\.00 GiB, one KV block"):
        plan(replace(PROFILE, weights=70 * GIB, group=GIB))


def test_a_requested_size_is_for_all_ranks_together() -> None:
    assert plan(memory=8 * GIB, num_ranks=2) == plan(memory=4 * GIB)
    with pytest.raises(SetupError, match=r"120\.00 GiB, 60\.00 GiB for each of 2 ranks, does not fit"):
        plan(memory=120 * GIB, num_ranks=2)
