"""Whether the largest steps are run at a start depends on what an earlier one has kept, and on how many ranks run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.choice import KernelOptions
from kernels.decoder import ALONE
from pdserve.model.config import ModelConfig
from pdserve.model.loader import load_decoder
from pdserve.worker.config import WorkerConfig
from pdserve.worker.load import gpu_load
from pdserve.worker.load.gpu_load import _profile
from pdserve.worker.load.load_plan import LoadPlan
from pdserve.worker.load.memory_profile import Activations, MemoryProfile
from pdserve.worker.serve import warm_up as warming
from tests.unit.model.tiny import Second, save_model


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadPlan:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    memory = SimpleNamespace(total=lambda: 1000, allocated=lambda: 700)
    monkeypatch.setattr(gpu_load, "CudaMemory", lambda device: memory)
    path = save_model(tmp_path / "model")
    return LoadPlan(
        config=WorkerConfig(model=str(path), redis_url=""),
        model=ModelConfig.from_dir(path),
        options=KernelOptions(),
        device=torch.device("cpu"),
        ranks=ALONE,
        agree=lambda budget: budget,
        fingerprint="of the model",
        scales=None,
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of each measurement."""
    calls: list[Any] = []

    def measure(*arguments: Any) -> Activations:
        calls.append(arguments)
        return Activations(peak=20, graphs=3)

    monkeypatch.setattr(gpu_load, "measure_activations", measure)
    return calls


def profile(plan: LoadPlan) -> MemoryProfile:
    return _profile(plan, load_decoder(plan.config.model_dir), free=900, group_bytes=5)


def test_a_second_start_measures_nothing_unless_something_has_changed(
    plan: LoadPlan, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = MemoryProfile(total=1000, free=900, weights=700, activations=20, graphs=3, group=5)
    assert profile(plan) == profile(plan) == expected
    assert len(measured) == 1
    for count, changed in enumerate(
        (
            replace(plan, fingerprint="of another model"),
            replace(plan, config=replace(plan.config, max_num_batched_tokens=77)),
            replace(plan, config=replace(plan.config, block_size=32)),
        ),
        start=2,
    ):
        profile(changed)
        assert len(measured) == count
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:4")
    profile(plan)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    profile(plan)
    assert len(measured) == 6


def test_ranks_measure_at_each_start(plan: LoadPlan, measured: list[Any]) -> None:
    """They compute each step together. Fails where a rank that has kept a measurement leaves the others waiting."""
    assert profile(replace(plan, ranks=Second())) == profile(replace(plan, ranks=Second()))
    assert len(measured) == 2


def test_a_warm_up_without_enough_memory_forgets_what_was_measured(
    plan: LoadPlan, measured: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every start would fail alike."""

    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    profile(plan)
    monkeypatch.setattr(warming, "populate_head", lambda memory: None)
    monkeypatch.setattr(warming, "_record_graphs", lambda runner: None)
    monkeypatch.setattr(warming, "_try_out", fails)
    loaded: Any = SimpleNamespace(kv_cache=SimpleNamespace(memory=None), runner=None)
    with pytest.raises(torch.OutOfMemoryError):
        warming.warm_up(loaded, max_prompt_tokens=1)
    profile(plan)
    assert len(measured) == 2
