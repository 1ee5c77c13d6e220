"""A model directory on disk: its weight files, and the fingerprint that names its KV blocks. No torch."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fields import Fields
from pdserve.model.stored_tensors import stored_tensors
from pdserve.model.weight_digest import weight_digest

_INDEX = "model.safetensors.index.json"
#: Files that are read at a time.
_READERS = 4
#: Far above the number of files of a real model, and below the number of files that a process may have open.
_MAX_FILES = 1000


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files: those of the index, or else a single file. Raises `SetupError` when one is missing."""
    index = model_dir / _INDEX
    if index.exists():
        weight_map = Fields.read(index).object("weight_map")
        names = sorted({weight_map.text(tensor) for tensor in weight_map.names()})
        if any(Path(name).name != name for name in names):
            raise SetupError(f"{index} refers to files outside its directory. Use a model whose files are all in one.")
        if len(names) > _MAX_FILES or any(not name.isprintable() or len(name.encode()) > 255 for name in names):
            raise SetupError(f"{index} names {len(names)} files (limit {_MAX_FILES}), or one with an unusable name.")
    else:
        names = sorted(path.name for path in model_dir.glob("*.safetensors"))
        names = ["model.safetensors"] if "model.safetensors" in names else names
    if not names:
        raise SetupError(f"{model_dir} has no *.safetensors file, the only supported weight format in a directory.")
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise SetupError(f"{model_dir} lacks {', '.join(missing)}. Was the download interrupted?")
    return [model_dir / name for name in names]


def fingerprint(model_dir: Path) -> str:
    """32 hex digits that are equal in every process and on every machine that has the same model.

    They cover the config, and names and every byte of the weight files, of which digests are kept. Without a kept one,
    it takes about a second per GB of a file; files are read side by side. Raises `SetupError`.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
        digest.update(json.dumps(config, sort_keys=True).encode())
        paths = weight_files(model_dir)
        for path in paths:
            stored_tensors(path)  # Refuses a damaged file before anything starts.
        with ThreadPoolExecutor(min(len(paths), _READERS)) as readers:
            for path, sha256 in zip(paths, readers.map(weight_digest, paths), strict=True):
                digest.update(f"{path.name} {sha256} ".encode())
    except OSError as error:
        raise SetupError(f"Cannot read {error.filename or model_dir}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise SetupError(f"{model_dir / 'config.json'} is not valid JSON: {error}.") from error
    return digest.hexdigest()
