"""The config of a model is read without its weights, from whatever names the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.fetch.config_only import config_of
from pdserve.model.fetch.progress import silent
from tests.unit.model.fetch.gguf_files import write_model
from tests.unit.model.tiny import LLAMA, random_tensors


def of(model: str) -> ModelConfig:
    return config_of(model, cache_dir=None, progress=silent)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory without weights and without a tokenizer."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def test_a_directory_and_a_bare_config_are_enough(directory: Path) -> None:
    expected = ModelConfig.from_hf(LLAMA)
    assert of(str(directory)) == of(str(directory / "config.json")) == expected


def test_a_gguf_file_is_not_converted(tmp_path: Path) -> None:
    expected = ModelConfig.from_hf(LLAMA)
    path = tmp_path / "model.gguf"
    write_model(path, "llama", expected, random_tensors(expected))
    found = of(str(path))
    assert (found.num_layers, found.num_kv_heads, found.head_dim, found.vocab_size) == (
        expected.num_layers,
        expected.num_kv_heads,
        expected.head_dim,
        expected.vocab_size,
    )
    assert list(tmp_path.iterdir()) == [path]


def test_a_hub_id_downloads_its_config_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def download(repo_id: str, name: str, **_: object) -> str:
        calls.append((repo_id, name))
        return str(directory / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert of("org/name") == ModelConfig.from_hf(LLAMA)
    assert calls == [("org/name", "config.json")]


def test_an_unreachable_hub_is_an_error_of_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*_: object, **__: object) -> str:
        raise OSError("no network.\nmore")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    words = r"^Cannot get the config of org/name from the model hub: no network\. Use [^\n]*$"
    with pytest.raises(SetupError, match=words):
        of("org/name")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SetupError, match=r"is not a directory, a config\.json, a \.gguf file or a hub id"):
        of("no such model")
