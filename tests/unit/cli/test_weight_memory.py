"""The estimate of a worker's weights, against what the kernels say they take."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kernels.choice import KernelOptions, instruction_sets
from pdserve.cli.up_config import UpConfig
from pdserve.cli.weight_memory import private_weight_bytes
from pdserve.model.config import ModelConfig
from pdserve.model.loader import memory_of_weights
from pdserve.model.sharding import tensor_shards

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 8000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


def write_model(directory: Path, *, tied: bool = True) -> Path:
    """A model whose weights have the right size; nobody reads them."""
    (directory / "config.json").write_text(json.dumps({**_CONFIG, "tie_word_embeddings": tied}))
    shards = tensor_shards(ModelConfig.from_dir(directory), 0, 1)
    elements = sum(math.prod(each.stop - each.start for each in shard) for shard in shards.values())
    with (directory / "model.safetensors").open("wb") as file:
        file.truncate(2 * elements)
    return directory


needs_kernels = pytest.mark.skipif(not instruction_sets(), reason="no C++ kernels")


@needs_kernels
@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}, {"dtype": "float32"}, {"dtype": "float16"}])
@pytest.mark.parametrize("tied", [True, False])
def test_the_estimate_is_what_the_kernels_will_take(settings: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    path = write_model(tmp_path, tied=tied)
    estimate = private_weight_bytes(path, UpConfig(**settings))
    options = KernelOptions(quantization=settings.get("quantization"))
    exact = memory_of_weights(ModelConfig.from_dir(path), dtype=settings.get("dtype", "auto"), kernels=options)
    assert estimate == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    "settings",
    [{"kernels": "reference"}, {"device": "cuda"}, {"kv_cache_dtype": "fp8_e4m3"}, {"tensor_parallel_size": 2}],
)
def test_weights_that_workers_share_or_keep_on_gpus_take_nothing(settings: dict[str, Any], tmp_path: Path) -> None:
    assert private_weight_bytes(write_model(tmp_path), UpConfig(**settings)) == 0


def test_plain_torch_converts_to_another_type(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    stored = (path / "model.safetensors").stat().st_size
    assert private_weight_bytes(path, UpConfig(kernels="reference", dtype="float32")) == 2 * stored
    assert private_weight_bytes(path, UpConfig(kernels="reference", dtype="bfloat16")) == 0
