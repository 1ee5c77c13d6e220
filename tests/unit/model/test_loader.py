"""Loading a model directory: weights are mapped, and a mismatch with the config is a readable error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.choice import Backend, KernelOptions
from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.loader import load_decoder, load_weights, memory_of_weights
from tests.unit.kernels.cpu_ops import INSTRUCTION_SETS, needs_kernels
from tests.unit.model.tiny import Second, random_tensors, save_model


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    """Replaces, adds or (None) removes tensors; a name's dots are written as two underscores."""
    tensors = load_file(path / "model.safetensors")
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, path / "model.safetensors")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    rewrite(save_model(tmp_path), model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(SetupError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_decoder(tmp_path)


def test_a_tensor_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    rewrite(save_model(tmp_path), model__layers__0__self_attn__q_norm__weight=torch.ones(8))
    with pytest.raises(SetupError, match=r"has tensors that llama does not: model\.layers\.0\.self_attn\.q_norm"):
        load_decoder(tmp_path)


def test_many_missing_tensors_are_an_error_of_one_line(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 50}))
    with pytest.raises(SetupError, match="and 429 more") as refused:
        load_decoder(tmp_path)
    assert len(str(refused.value)) < 400


def test_a_shape_that_contradicts_the_config_is_named(tmp_path: Path) -> None:
    rewrite(save_model(tmp_path), model__layers__0__self_attn__k_proj__weight=torch.ones(32, 32))
    with pytest.raises(SetupError, match=r"k_proj\.weight has shape \[32, 32\], but config\.json requires \[16, 32\]"):
        load_decoder(tmp_path)


def test_a_quantized_tensor_is_refused(tmp_path: Path) -> None:
    rewrite(save_model(tmp_path), model__norm__weight=torch.ones(32, dtype=torch.int8))
    with pytest.raises(SetupError, match="type I8"):
        load_decoder(tmp_path)


def test_obsolete_tensors_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    save_model(tmp_path, {"tie_word_embeddings": True})
    rewrite(
        tmp_path,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
        lm_head__weight=torch.zeros(97, 32),
    )
    weights = load_weights(tmp_path, ModelConfig.from_dir(tmp_path))
    assert weights.lm_head is weights.embedding


def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(SetupError, match="not a readable safetensors file"):
        load_decoder(tmp_path)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="dtype 'int4' is not supported; supported: auto, float32"):
        load_decoder(save_model(tmp_path), dtype="int4")


def test_a_checkpoint_may_be_split_into_several_files(tmp_path: Path) -> None:
    save_model(tmp_path)
    config = ModelConfig.from_dir(tmp_path)
    whole = load_weights(tmp_path, config)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    weight_map = {name: file for file, members in files.items() for name in members}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(load_weights(tmp_path, config).layers[1].up, whole.layers[1].up)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(SetupError, match=r"lacks model-00002-of-00002\.safetensors"):
        load_decoder(tmp_path)


def test_an_index_must_not_refer_to_files_outside_its_directory(tmp_path: Path) -> None:
    save_model(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SetupError, match="outside"):
        load_decoder(tmp_path)


def test_weights_in_the_files_own_dtype_stay_mapped(tmp_path: Path) -> None:
    path = save_model(tmp_path, {"torch_dtype": "bfloat16"}, torch.bfloat16) / "model.safetensors"
    weights = load_weights(tmp_path, ModelConfig.from_dir(tmp_path))
    mapped = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    ranges = [tuple(int(end, 16) for end in entry.split("-")) for entry in mapped]
    for layer in weights.layers:
        for tensor in (layer.q, layer.down, layer.input_norm):
            assert any(start <= tensor.data_ptr() < end for start, end in ranges), "the tensor is a copy"


#: Sizes that need padding, of rows to panels and of depths to units.
PADDED = {"vocab_size": 103, "hidden_size": 42, "intermediate_size": 53, "head_dim": 10}
#: Sizes without padding, for weights that are packed as codes: padding has no codes.
ALIGNED = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "head_dim": 16}


@needs_kernels
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_the_memory_of_packed_weights_is_known_before_they_are_packed(
    tmp_path: Path, instruction_set: str, dtype: str, quantization: str | None
) -> None:
    has_codes = dtype == "bfloat16" and quantization is None and instruction_set.startswith("avx512")
    save_model(tmp_path, (ALIGNED if has_codes else PADDED) | {"torch_dtype": dtype}, getattr(torch, dtype))
    options = KernelOptions(instruction_set=instruction_set, quantization=quantization)
    config = ModelConfig.from_dir(tmp_path)
    expected = memory_of_weights(config, dtype="auto", kernels=options)
    actual = load_decoder(tmp_path, kernels=options).weight_bytes
    # With codes, weights that have none are stored in addition.
    assert expected <= actual <= expected * (1.05 if has_codes else 1)


@needs_kernels
def test_the_kernels_keep_a_converted_embedding(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(save_model(tmp_path))  # float32
    packed = memory_of_weights(replace(config, dtype="bfloat16"), dtype="auto", kernels=KernelOptions())
    kept = memory_of_weights(config, dtype="bfloat16", kernels=KernelOptions()) - packed
    assert kept == 2 * config.vocab_size * config.hidden_size


def test_plain_torch_needs_no_memory_for_weights_unless_it_converts_them(tmp_path: Path) -> None:
    config, options = ModelConfig.from_dir(save_model(tmp_path)), KernelOptions(backend=Backend.REFERENCE)
    assert memory_of_weights(config, dtype="auto", kernels=options) == 0
    whole = 2 * sum(tensor.numel() for tensor in random_tensors(config).values())
    assert memory_of_weights(config, dtype="bfloat16", kernels=options) == whole
    assert memory_of_weights(config, dtype="auto", kernels=KernelOptions(), ranks=Second()) == 0
    assert whole < memory_of_weights(config, dtype="bfloat16", kernels=KernelOptions(), ranks=Second()) < 2 * whole
