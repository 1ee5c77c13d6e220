"""Scales of an fp8 KV cache: where checkpoints keep them, and the digest that distinguishes two sets of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.base.errors import LayoutMismatch, SetupError
from pdserve.base.layout import KvLayout
from pdserve.model.config import ModelConfig
from pdserve.model.kv_scales import read_kv_scales, scales_digest
from pdserve.model.loader import load_weights
from pdserve.worker.config import FP8_KV, WorkerConfig
from pdserve.worker.load import load_plan
from pdserve.worker.serve.loaded_model import load_model
from tests.unit.model.tiny import save_model, with_scales

#: The field as llm-compressor writes it when only the KV cache is quantized.
KV_ONLY = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}


def scales_of(path: Path) -> Tensor:
    return read_kv_scales(path, ModelConfig.from_dir(path))


def test_without_scales_in_the_checkpoint_all_are_one(tmp_path: Path) -> None:
    scales = scales_of(save_model(tmp_path))
    assert scales.dtype == torch.float32
    assert torch.equal(scales, torch.ones(2, 2, 2))


@pytest.mark.parametrize(
    ("k_name", "v_name"),
    [("k_scale", "v_scale"), ("attn.k_scale", "attn.v_scale"), ("k_proj.k_scale", "v_proj.v_scale")],
)
def test_scales_are_found_by_the_names_that_tools_give_them(tmp_path: Path, k_name: str, v_name: str) -> None:
    path = with_scales(
        tmp_path,
        {
            f"0.{k_name}": torch.tensor(0.5),
            f"0.{v_name}": torch.tensor([0.25], dtype=torch.bfloat16),
            f"1.{k_name}": torch.tensor([[[3.0]], [[4.0]]]),
        },
        quantization_config=KV_ONLY,
    )
    assert scales_of(path).tolist() == [[[0.5, 0.5], [0.25, 0.25]], [[3.0, 4.0], [1.0, 1.0]]]
    # Loading weights ignores scales.
    load_weights(path, ModelConfig.from_dir(path))


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (torch.ones(3), r"self_attn\.k_scale has 3 numbers, but must have 1, or 2 \(one per KV head\)"),
        (torch.tensor(0.0), r"self_attn\.k_scale is 0\.0, but a scale of the KV cache must be a finite number above"),
        (torch.tensor(float("nan")), r"self_attn\.k_scale is nan"),
        (torch.tensor([1.0, float("inf")]), r"self_attn\.k_scale is inf"),
    ],
)
def test_an_invalid_scale_is_refused_by_name(tmp_path: Path, scale: Tensor, message: str) -> None:
    with pytest.raises(SetupError, match=message):
        scales_of(with_scales(tmp_path, {"1.k_scale": scale}))


def test_the_digest_changes_with_each_scale() -> None:
    scales = torch.ones(2, 2, 2)
    assert scales_digest(scales) == scales_digest(scales.clone())
    digests = {scales_digest(scales)}
    for index in range(8):
        scales.view(-1)[index] = 1 + 2**-20
        digests.add(scales_digest(scales))
    assert len(digests) == 9


@pytest.mark.parametrize(
    "changes",
    [
        {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
        {"quant_method": "fp8"},
        {"kv_cache_scheme": None},
        {"kv_cache_scheme": {"num_bits": 8, "type": "int"}},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": True}},
        {"kv_cache_scheme": {"num_bits": 8, "type": "float", "symmetric": False}},
        {"sparsity_config": {"format": "dense"}},
    ],
)
def test_a_checkpoint_that_quantizes_more_than_the_kv_cache_is_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    path = with_scales(tmp_path, {}, quantization_config=KV_ONLY | changes)
    with pytest.raises(SetupError, match="quantization_config is not supported"):
        ModelConfig.from_dir(path)


def layout_of(path: Path, kv_cache_dtype: str = FP8_KV, dtype: str = "auto") -> KvLayout:
    config = WorkerConfig(
        model=str(path),
        redis_url="",
        kernels="reference",
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=1 << 20,
        threads=1,
    )
    loaded = load_model(config)
    assert loaded.kv_cache.tensor[0].nbytes == loaded.layout.block_bytes
    return loaded.layout


def test_the_layout_names_the_scales_and_the_dtype_of_computation(tmp_path: Path) -> None:
    path = save_model(tmp_path)
    fp8, unquantized = layout_of(path), layout_of(path, "auto")
    assert (fp8.dtype, unquantized.dtype) == ("fp8_e4m3", "float32")
    assert 4 * fp8.block_bytes == unquantized.block_bytes
    assert fp8.model.startswith(f"{unquantized.model}/float32/kv-scales-")
    assert layout_of(path, dtype="float32") == fp8
    assert layout_of(path, dtype="bfloat16") == replace(fp8, model=fp8.model.replace("/float32/", "/bfloat16/"))


def test_workers_with_different_scales_refuse_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Even if the fingerprints of the two checkpoints were equal.
    monkeypatch.setattr(load_plan, "fingerprint", lambda path: "same")
    one = layout_of(save_model(tmp_path / "plain"))
    other = layout_of(with_scales(tmp_path / "scaled", {"1.k_scale": torch.tensor(0.5)}))
    with pytest.raises(LayoutMismatch, match=r"model is 'same/float32/kv-scales-\w{16}' here and 'same/"):
        one.require_equal(other)
