"""What reads files of a model: each target damages one file of a valid model, and reads it as the product does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

import torch

from pdserve.base.errors import RequestError, SetupError
from pdserve.model import tokenizer_file
from pdserve.model.chat_template import ChatTemplate
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig
from pdserve.model.fetch.gguf_convert import convert_gguf
from pdserve.model.fetch.progress import silent
from pdserve.model.loader import load_weights
from pdserve.model.rope import make_cos_sin
from router_svc.api.sampling_defaults import SamplingDefaults
from tests.fuzz.files.mutations import damaged_bytes, damaged_json
from tests.unit.model.fetch.gguf_files import write_model
from tests.unit.model.tiny import LLAMA, random_tensors, save_model
from tests.unit.model.vocabularies import byte_level, sentencepiece

#: Longest line that a file may put before a user.
_MAX_LINE = 5000
_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}"
_ROPE: tuple[dict[str, object], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
)


class Seeds:
    """A valid model in `directory`, and a valid GGUF file beside it."""

    def __init__(self, directory: Path) -> None:
        self.model = save_model(directory / "model")
        byte_level().save(str(self.model / "tokenizer.json"))
        sentencepiece().save(str(directory / "sentencepiece.json"))
        _write(self.model / "generation_config.json", {"eos_token_id": [2, 3], "temperature": 0.7, "top_k": 20})
        _write(self.model / "tokenizer_config.json", {"eos_token": "<|end|>", "chat_template": _TEMPLATE})
        weights = {"weight_map": dict.fromkeys(random_tensors(ModelConfig.from_hf(LLAMA)), "model.safetensors")}
        _write(directory / "index.json", weights)
        self.gguf = directory / "model.gguf"
        config = ModelConfig.from_hf(LLAMA)
        write_model(self.gguf, "llama", config, random_tensors(config))
        self.scratch = directory / "scratch"
        self.directory = directory

    def copy(self) -> Path:
        """A fresh copy of the model's directory."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        shutil.copytree(self.model, self.scratch)
        return self.scratch


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def read_config(seeds: Seeds, random: Random) -> None:
    """config.json, and what is computed from it before any weight is read."""
    directory = seeds.copy()
    config = {**LLAMA, "rope_scaling": random.choice((*_ROPE, None)), "layer_types": None, "head_dim": 8}
    (directory / "config.json").write_bytes(damaged_json(json.dumps(config).encode(), random))
    model = ModelConfig.from_dir(directory)
    if model.head_dim <= 4096:
        make_cos_sin(model.rope, head_dim=model.head_dim, max_position_embeddings=512, max_model_len=8)
    load_weights(directory, model)


def read_generation_config(seeds: Seeds, random: Random) -> None:
    """generation_config.json, as the worker and as the router read it."""
    directory = seeds.copy()
    path = directory / "generation_config.json"
    path.write_bytes(damaged_json(path.read_bytes(), random))
    ModelConfig.from_dir(directory)
    SamplingDefaults.from_dir(directory)


def read_safetensors(seeds: Seeds, random: Random) -> None:
    """The weights, of which mostly the header is damaged."""
    directory = seeds.copy()
    path = directory / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = damaged_json(content[8 : 8 + size], random) if random.random() < 0.7 else content[8 : 8 + size]
    content = len(header).to_bytes(8, "little") + header + content[8 + size :]
    path.write_bytes(damaged_bytes(content, random) if random.random() < 0.4 else content)
    fingerprint(directory)
    load_weights(directory, ModelConfig.from_dir(directory), dtype=random.choice(("auto", "bfloat16")))


def read_index(seeds: Seeds, random: Random) -> None:
    """The list of weight files."""
    directory = seeds.copy()
    content = damaged_json((seeds.directory / "index.json").read_bytes(), random)
    (directory / "model.safetensors.index.json").write_bytes(content)
    fingerprint(directory)
    load_weights(directory, ModelConfig.from_dir(directory))


def read_tokenizer(seeds: Seeds, random: Random) -> None:
    """tokenizer.json, with which a text is then encoded and decoded."""
    directory = seeds.copy()
    kind = random.choice((seeds.model / "tokenizer.json", seeds.directory / "sentencepiece.json"))
    (directory / "tokenizer.json").write_bytes(damaged_json(kind.read_bytes(), random))
    with closing(tokenizer_file.read_tokenizer(directory)) as tokenizer:
        tokenizer.decode(tokenizer.encode("Hello <|end|> \u00e9\n  1234 two words"))


def read_tokenizer_config(seeds: Seeds, random: Random) -> None:
    """tokenizer_config.json with its template, which then renders a conversation."""
    directory = seeds.copy()
    path = directory / "tokenizer_config.json"
    path.write_bytes(damaged_json(path.read_bytes(), random))
    ModelConfig.from_dir(directory)
    if random.random() < 0.7:
        (directory / "chat_template.jinja").write_bytes(damaged_bytes(_TEMPLATE.encode(), random))
    ChatTemplate.from_dir(directory).render([{"role": "user", "content": "Hello"}])


def read_gguf(seeds: Seeds, random: Random) -> None:
    """A GGUF file, whose damage is mostly in its header."""
    directory = seeds.copy()
    content = seeds.gguf.read_bytes()
    header = random.choice((256, 1500, 4000, len(content)))
    path = directory / "damaged.gguf"
    path.write_bytes(damaged_bytes(content[:header], random) + content[header:])
    convert_gguf(path, directory, silent)


TARGETS: dict[str, Callable[[Seeds, Random], None]] = {
    target.__name__: target
    for target in (
        read_config,
        read_generation_config,
        read_safetensors,
        read_index,
        read_tokenizer,
        read_tokenizer_config,
        read_gguf,
    )
}


def run(name: str, seeds: Seeds, seed: int) -> bool:
    """One damaged file; True if it was read. Any error but one line of `SetupError` or `RequestError` passes on."""
    try:
        with torch.no_grad():
            TARGETS[name](seeds, Random(f"{name} {seed}"))
    except SetupError as error:
        text = str(error)
        assert text.isprintable(), f"not one line: {text!r}"
        assert 10 < len(text) < _MAX_LINE, f"a line of {len(text)} characters"
        return False
    except RequestError:
        return False
    return True
