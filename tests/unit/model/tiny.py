"""Tiny models with random weights, made without transformers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.model.config import ModelConfig
from pdserve.model.tensors import tensor_shapes

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "eos_token_id": 2,
}


def random_tensors(config: ModelConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    """Random values for every tensor of the config."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)).to(dtype)
        for name, shape in tensor_shapes(config).items()
    }


def save_model(directory: Path, changes: dict[str, object] | None = None, dtype: torch.dtype = torch.float32) -> Path:
    """Writes a model directory without a tokenizer."""
    config = LLAMA | (changes or {})
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(random_tensors(ModelConfig.from_hf(config), dtype), directory / "model.safetensors")
    return directory


def with_scales(path: Path, scales: dict[str, Tensor], **fields: object) -> Path:
    """Writes a tiny model with scales. "1.k_scale" is the tensor k_scale of layer 1's `self_attn`."""
    save_model(path)
    (path / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | fields))
    tensors = load_file(path / "model.safetensors")
    for key, scale in scales.items():
        layer, _, name = key.partition(".")
        tensors[f"model.layers.{layer}.self_attn.{name}"] = scale
    save_file(tensors, path / "model.safetensors")
    return path


class Second:
    """The second of two ranks, without communication with the first."""

    rank, size = 1, 2

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        return x
