"""The config of a model without its weights, from any name of it that `resolve` takes. No torch."""

from __future__ import annotations

from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.config import ModelConfig
from pdserve.model.fetch.gguf_config import hf_config
from pdserve.model.fetch.gguf_file import GgufFile
from pdserve.model.fetch.hub_name import HubName, hub_name
from pdserve.model.fetch.progress import ProgressCallback
from pdserve.model.resolve import ALIASES, resolve_model


def config_of(model: str, *, cache_dir: Path | None, progress: ProgressCallback) -> ModelConfig:
    """The config of an alias, a directory, a config.json, a .gguf file or a hub id.

    Of a hub id only config.json is downloaded; an alias is downloaded as `pdserve up` does, unless it is cached.
    Raises `SetupError`.
    """
    path = Path(model).expanduser()
    if model in ALIASES:
        return ModelConfig.from_dir(resolve_model(model, cache_dir=cache_dir, progress=progress).path)
    if path.is_dir():
        return ModelConfig.from_dir(path)
    if path.suffix == ".gguf" and path.is_file():
        return ModelConfig.from_hf(hf_config(GgufFile(path)))
    if path.name == "config.json" and path.is_file():
        return ModelConfig.from_dir(path.parent)
    if (hub := hub_name(model)) is not None:
        return ModelConfig.from_dir(_config_from_hub(hub, cache_dir).parent)
    raise SetupError(
        f"Model {model!r} is not a directory, a config.json, a .gguf file or a hub id (org/name); known aliases: "
        f"{', '.join(ALIASES)}."
    )


def _config_from_hub(model: HubName, cache_dir: Path | None) -> Path:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise SetupError(
            f"Cannot get {model} from the model hub without the package huggingface_hub. Install it with pip."
        ) from error
    hub_dir = None if cache_dir is None else cache_dir / "hub"
    try:
        return Path(hf_hub_download(model.repo_id, "config.json", revision=model.revision, cache_dir=hub_dir))
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise SetupError(
            f"Cannot get the config of {model} from the model hub: {reason}. Use a local config.json instead."
        ) from error
