"""The KV cache is sized from what was asked and what there is, and refusals carry the numbers."""

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
from pdserve.worker.load.kv_budget import plan_kv
from pdserve.worker.load.model_shard import load_shard
from tests.unit.kernels.cpu_ops import needs_kernels
from tests.unit.model.tiny import random_tensors, save_model

LAYOUT = KvLayout(model="m", dtype="bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
MIB = 1024**2


def test_a_block_of_the_default_model_has_368640_bytes() -> None:
    assert LAYOUT.block_bytes == 368_640


def test_the_cache_holds_as_many_blocks_as_fit() -> None:
    budget = plan_kv(LAYOUT, weight_bytes=0, kv_cache_memory=100 * MIB, wanted_model_len=None, model_limit=2048)
    assert (budget.num_blocks, budget.max_model_len) == (100 * MIB // 368_640, 2048)


def test_a_small_cache_lowers_the_models_limit() -> None:
    budget = plan_kv(LAYOUT, weight_bytes=0, kv_cache_memory=10 * 368_640, wanted_model_len=None, model_limit=8192)
    assert (budget.num_blocks, budget.max_model_len) == (10, 160)


@pytest.mark.parametrize(
    ("memory", "wanted", "needle"),
    [
        (1000, None, "cannot hold one block of 16 tokens"),
        (2**60, None, "does not fit"),
        (100 * MIB, 9000, "exceeds the model's own limit of 8192"),
        (10 * 368_640, 161, "is 160 tokens"),
    ],
)
def test_what_cannot_be_is_refused_with_its_numbers(memory: int, wanted: int | None, needle: str) -> None:
    with pytest.raises(SetupError, match=needle):
        plan_kv(LAYOUT, weight_bytes=0, kv_cache_memory=memory, wanted_model_len=wanted, model_limit=8192)


def test_what_weights_take_is_not_free_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
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
            plan_kv(
                LAYOUT,
                weight_bytes=weight_bytes,
                kv_cache_memory=100 * MIB,
                wanted_model_len=None,
                model_limit=64,
            )


@pytest.mark.parametrize(("weight_mib", "blocks"), [(0, 200 * MIB // 368_640), (500, 100 * MIB // 368_640)])
def test_the_default_is_a_fifth_of_what_weights_leave(
    weight_mib: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_budget, "available_memory_bytes", lambda: 1000 * MIB)
    budget = plan_kv(LAYOUT, weight_bytes=weight_mib * MIB, kv_cache_memory=None, wanted_model_len=None, model_limit=64)
    assert budget.num_blocks == blocks


def test_weights_that_leave_nothing_are_refused_with_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_budget, "available_memory_bytes", lambda: 1000 * MIB)
    with pytest.raises(SetupError, match=r"weights take 1.17 GiB"):
        plan_kv(LAYOUT, weight_bytes=1200 * MIB, kv_cache_memory=None, wanted_model_len=None, model_limit=64)


def test_a_worker_counts_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In another dtype than they are stored in, weights are copies whatever computes with them.
    model = save_model(tmp_path)
    config = DecodeConfig(
        model=str(model), redis_url="", dtype="bfloat16", block_size=4, kv_cache_memory=64 * 1024, kernels="reference"
    )
    taken = 2 * sum(tensor.numel() for tensor in random_tensors(ModelConfig.from_dir(model)).values())
    monkeypatch.setattr(kv_budget, "available_memory_bytes", lambda: 64 * 1024 + taken - 1)
    with pytest.raises(SetupError, match="does not fit"):
        load_shard(config, torch.device("cpu"))
    monkeypatch.setattr(kv_budget, "available_memory_bytes", lambda: 64 * 1024 + taken)
    load_shard(config, torch.device("cpu"))


@needs_kernels
def test_blocks_of_rounded_weights_are_those_of_another_model(tmp_path: Path) -> None:
    config = DecodeConfig(model=str(save_model(tmp_path)), redis_url="", block_size=4, kv_cache_memory=64 * 1024)
    plain = load_shard(config, torch.device("cpu")).layout
    rounded = load_shard(replace(config, quantization="int8"), torch.device("cpu")).layout
    assert rounded.model == f"{plain.model}/int8"
