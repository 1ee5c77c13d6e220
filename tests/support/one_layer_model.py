"""A model whose steps take next to no time: one layer of random weights with the default model's name and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from pdserve.model.config import ModelConfig
from pdserve.model.resolve import resolve_model
from pdserve.model.tensors import tensor_shapes
from tests.support.cluster import MODEL

#: Changes to the default model's config. Untied embeddings, so that the most likely token is not the last one again.
_CHANGES = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


def write_one_layer_model(parent: Path) -> Path:
    """Write the model into a new directory below `parent` and return it. Clients call the model `MODEL`."""
    directory = parent / MODEL
    directory.mkdir()
    default = resolve_model(MODEL).path
    for file in default.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (directory / file.name).symlink_to(file)
    config = json.loads((default / "config.json").read_text(encoding="utf-8")) | _CHANGES
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16)
        for name, shape in tensor_shapes(ModelConfig.from_hf(config)).items()
    }
    save_file(tensors, directory / "model.safetensors")
    return directory
