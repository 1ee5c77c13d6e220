"""Models with the name and the tokenizer of the default model, whose steps take less time. Clients use `MODEL`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernels.cpu import native
from pdserve.model.config import ModelConfig
from pdserve.model.resolve import resolve_model
from pdserve.model.tensors import tensor_shapes
from tests.support import depth
from tests.support.cluster import MODEL

_EMBEDDING = "model.embed_tokens.weight"
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
#: Layers of `model_for_depth`.
NUM_LAYERS = 30 if depth.IS_FULL else 4
#: Dtype of clusters whose answers are compared. Without the C++ kernels only float32 is exact; steps in bfloat16, which
#: has half of the bytes, take half of the time.
EXACT_DTYPE = "float32" if depth.IS_FULL or native.load() is None else "bfloat16"
#: Changes to the default model's config. Untied embeddings, so that the most likely token is not the last one again.
_ONE_LAYER = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}


def model_for_depth(parent: Path) -> str:
    """The default model at full depth, else its first layers with their weights, below `parent`.

    A worker loads those in two seconds of processor time less, and its requests take a part of the time.
    """
    return MODEL if depth.IS_FULL else write_first_layers(parent)


def write_first_layers(parent: Path, num_layers: int = 4) -> str:
    """Write the first layers of the default model, with their weights, below `parent`; the path of the new directory.

    Its answers make no sense, and are as exact as any.
    """
    return str(_write(parent, {"num_hidden_layers": num_layers}, _first_layers))


def write_one_layer_model(parent: Path, seed: int = 0) -> Path:
    """Write one small layer of random weights into a new directory below `parent`, and return it."""
    return _write(parent, _ONE_LAYER, lambda _, config: _random_weights(config, seed))


def write_larger_vocabulary(parent: Path, vocab_size: int) -> Path:
    """Write the default model with more tokens, which join two others, into a new directory below `parent`.

    Such a token has the embedding of its first half.
    """
    tokenizer: dict[str, Any] = json.loads((resolve_model(MODEL).path / "tokenizer.json").read_text(encoding="utf-8"))
    vocab, special = tokenizer["model"]["vocab"], {each["content"] for each in tokenizer["added_tokens"]}
    tokens, rng = sorted(vocab.keys() - special, key=vocab.__getitem__), random.Random(0)
    rows = [*range(max(vocab.values()) + 1)]
    while len(rows) < vocab_size:
        first, second = rng.choice(tokens), rng.choice(tokens)
        if vocab.setdefault(first + second, len(rows)) == len(rows):
            rows.append(vocab[first])

    def weights(default: Path, _: Mapping[str, Any]) -> dict[str, Tensor]:
        tensors = load_file(default / "model.safetensors")
        return tensors | {_EMBEDDING: tensors[_EMBEDDING][rows].contiguous()}

    directory = _write(parent, {"vocab_size": vocab_size}, weights)
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    return directory


def _write(
    parent: Path, changes: Mapping[str, object], weights: Callable[[Path, Mapping[str, Any]], dict[str, Tensor]]
) -> Path:
    """`weights`: the tensors, from the default model's directory and the changed config."""
    directory = parent / MODEL
    directory.mkdir(parents=True)
    default = resolve_model(MODEL).path
    for file in default.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (directory / file.name).symlink_to(file)
    config = json.loads((default / "config.json").read_text(encoding="utf-8")) | changes
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights(default, config), directory / "model.safetensors")
    return directory


def _first_layers(default: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = load_file(default / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if _layer(name) < config["num_hidden_layers"]}


def _random_weights(config: Mapping[str, Any], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = tensor_shapes(ModelConfig.from_hf(config))
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else -1
