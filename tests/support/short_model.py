"""The first layers of the default model, with its weights, tokenizer and name: its shapes at a part of the cost."""

from __future__ import annotations

import json
import re
from pathlib import Path

from safetensors.torch import load_file, save_file

from pdserve.model.resolve import resolve_model
from tests.support import depth
from tests.support.cluster import MODEL

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def write_short_model(parent: Path, *, num_layers: int) -> Path:
    """Write the model into a new directory below `parent` and return it. Clients call the model `MODEL`."""
    directory = parent / MODEL
    directory.mkdir()
    default = resolve_model(MODEL).path
    for file in default.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (directory / file.name).symlink_to(file)
    config = json.loads((default / "config.json").read_text(encoding="utf-8")) | {"num_hidden_layers": num_layers}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(default / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < num_layers}
    save_file(kept, directory / "model.safetensors")
    return directory


def model_for_depth(parent: Path, *, num_layers: int) -> str:
    """What a cluster serves whose tests hold with any number of layers: the default model at full depth only.

    A worker loads it in two seconds of processor time less, and its requests take a part of the time.
    """
    return MODEL if depth.IS_FULL else str(write_short_model(parent, num_layers=num_layers))


def _layer(name: str) -> int:
    found = _LAYER.match(name)
    return int(found[1]) if found else -1
