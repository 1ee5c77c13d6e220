"""The KV cache is sized from the settings and the free memory, and refusals carry the numbers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_svc.config import DecodeConfig
from pdserve.base.errors import SetupError
from pdserve.base.layout import KvLayout
from pdserve.model.config import ModelConfig
from pdserve.worker.load import kv_budget
from pdserve.worker.load.kv_budget import KvBudget, KvRequest, plan_kv
from pdserve.worker.load.model_shard import load_shard
from tests.support.groups import TWO_GROUPS
from tests.unit.kernels.cpu_ops import needs_kernels
from tests.unit.model.tiny import random_tensors, save_model

LAYOUT = KvLayout.uniform(model="m", dtype="bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
MIB = 1024**2


def plan(
    memory: int | None = None, *, length: int | None = None, model_limit: int = 64, weight_bytes: int = 0
) -> KvBudget:
    request = KvRequest(memory_bytes=memory, max_model_len=length, model_limit=model_limit)
    return plan_kv(LAYOUT, request, weight_bytes=weight_bytes)


def test_a_block_of_the_default_model_has_368640_bytes() -> None:
    assert LAYOUT.block_bytes == 368_640


def test_the_cache_holds_as_many_blocks_as_fit() -> None:
    budget = plan(100 * MIB, model_limit=2048)
    assert (budget.num_blocks, budget.max_model_len) == (100 * MIB // 368_640, 2048)


def test_a_small_cache_lowers_the_models_limit() -> None:
    budget = plan(10 * 368_640, model_limit=8192)
    assert (budget.num_blocks, budget.max_model_len) == (10, 160)


def test_tokens_need_a_block_of_each_kv_group() -> None:
    request = KvRequest(memory_bytes=None, max_model_len=None, model_limit=8192)
    found = kv_budget.kv_budget(TWO_GROUPS, request, size=11 * TWO_GROUPS.block_bytes)
    assert (found.num_blocks, found.max_model_len) == (11, 5 * TWO_GROUPS.block_size)
    with pytest.raises(SetupError, match="cannot hold one block of 4 tokens"):
        kv_budget.kv_budget(TWO_GROUPS, request, size=TWO_GROUPS.block_bytes)


@pytest.mark.parametrize(
    ("memory", "wanted", "needle"),
    [
        (1000, None, "cannot hold one block of 16 tokens"),
        (2**60, None, "does not fit"),
        (100 * MIB, 9000, "exceeds the model's own limit of 8192"),
        (10 * 368_640, 161, "holds 160 tokens"),
    ],
)
def test_impossible_settings_are_refused_with_their_numbers(memory: int, wanted: int | None, needle: str) -> None:
    with pytest.raises(SetupError, match=needle):
        plan(memory, length=wanted, model_limit=8192)


def test_memory_for_the_weights_is_not_available_to_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "available_memory_bytes", lambda: 1000 * MIB)
    for weight_bytes, fits in ((900 * MIB, True), (901 * MIB, False)):
        with (
            nullcontext()
            if fits
            else pytest.raises(
                SetupError,
                match=r"100.00 MiB does not fit: 1000.00 MiB of memory is free, and the weights take 901.00 MiB",
            )
        ):
            plan(100 * MIB, weight_bytes=weight_bytes)


@pytest.mark.parametrize(("weight_mib", "blocks"), [(0, 200 * MIB // 368_640), (500, 100 * MIB // 368_640)])
def test_the_default_is_a_fifth_of_the_memory_after_the_weights(
    weight_mib: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_budget, "available_memory_bytes", lambda: 1000 * MIB)
    budget = plan(weight_bytes=weight_mib * MIB)
    assert budget.num_blocks == blocks


def test_weights_that_leave_no_memory_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "available_memory_bytes", lambda: 1000 * MIB)
    with pytest.raises(SetupError, match=r"weights take 1.17 GiB"):
        plan(weight_bytes=1200 * MIB)


def test_a_workers_weights_count_against_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Converted to another dtype, weights are copies in memory, whichever kernels compute with them.
    model = save_model(tmp_path)
    config = DecodeConfig(
        model=str(model), redis_url="", dtype="bfloat16", block_size=4, kv_cache_memory=64 * 1024, kernels="reference"
    )
    weight_bytes = 2 * sum(tensor.numel() for tensor in random_tensors(ModelConfig.from_dir(model)).values())
    monkeypatch.setattr(kv_budget, "available_memory_bytes", lambda: 64 * 1024 + weight_bytes - 1)
    with pytest.raises(SetupError, match="does not fit"):
        load_shard(config, torch.device("cpu"))
    monkeypatch.setattr(kv_budget, "available_memory_bytes", lambda: 64 * 1024 + weight_bytes)
    load_shard(config, torch.device("cpu"))


@needs_kernels
def test_blocks_of_rounded_weights_belong_to_another_model(tmp_path: Path) -> None:
    config = DecodeConfig(model=str(save_model(tmp_path)), redis_url="", block_size=4, kv_cache_memory=64 * 1024)
    plain = load_shard(config, torch.device("cpu")).layout
    rounded = load_shard(replace(config, quantization="int8"), torch.device("cpu")).layout
    assert rounded.model == f"{plain.model}/int8"
