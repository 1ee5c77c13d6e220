"""Files of a model that would be code for others are not opened here: pickled weights, and the model's own Python."""

from __future__ import annotations

import json
import os
import pickle
import sys
from pathlib import Path

import pytest

from pdserve.base.errors import SetupError
from pdserve.model.chat_template import ChatTemplate
from pdserve.model.loader import load_decoder
from pdserve.model.resolve import resolve_model
from pdserve.model.tokenizer_file import read_tokenizer
from tests.support.tiny_model import write_model
from tests.unit.model.tiny import save_model


class _Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_not_opened_whatever_their_name(name: str, tmp_path: Path) -> None:
    """CVE-2025-24357: weights were unpickled. Fails with a fallback to `torch.load`."""
    directory, marker = write_model(tmp_path / "model"), tmp_path / "marker"
    (directory / name).write_bytes(pickle.dumps(_Touch(marker)))
    for load in (load_decoder, lambda path: resolve_model(str(path))):
        with pytest.raises(SetupError, match="safetensors"):
            load(directory)
    assert not marker.exists()


def test_python_files_of_a_model_are_not_run(tmp_path: Path) -> None:
    """CVE-2026-22807: they ran although remote code was off. Fails where the modules of `auto_map` are imported."""
    directory, marker = write_model(tmp_path / "model"), tmp_path / "marker"
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    save_model(directory, config)
    for module in ("configuration_evil", "modeling_evil", "tokenization_evil", "sitecustomize", "kernels"):
        (directory / f"{module}.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n", encoding="utf-8")
    tokenizer = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["tokenization_evil.T", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    load_decoder(resolve_model(str(directory)).path)
    read_tokenizer(directory)
    ChatTemplate.from_dir(directory)
    own = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
    (directory / "config.json").write_text(json.dumps(config | {"auto_map": own}), encoding="utf-8")
    with pytest.raises(SetupError, match="auto_map is not supported"):
        resolve_model(str(directory))
    assert not marker.exists()
    assert str(directory) not in sys.path
