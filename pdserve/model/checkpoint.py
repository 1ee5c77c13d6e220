"""A model directory on disk: its weight files, and the fingerprint that names its KV blocks. No torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from operator import index as as_integer
from pathlib import Path
from typing import BinaryIO

from pdserve.base.errors import SetupError
from pdserve.model.fields import Fields

_INDEX = "model.safetensors.index.json"
#: Bytes read from each tensor for the fingerprint. Finetunes of a model share names, sizes and headers, but not these.
_SAMPLE_BYTES = 256
_MAX_HEADER_BYTES = 100_000_000
_MAX_OFFSET = 1 << 60
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

    They cover the config, names, sizes and headers of the weight files, and a sample from the middle of every tensor.
    Takes milliseconds. Raises `SetupError`.
    """
    digest = hashlib.blake2b(digest_size=16)
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
        digest.update(json.dumps(config, sort_keys=True).encode())
        for path in weight_files(model_dir):
            digest.update(f"{path.name} {path.stat().st_size} ".encode())
            with path.open("rb") as file:
                for sample in _samples(file, path):
                    digest.update(sample)
    except OSError as error:
        raise SetupError(f"Cannot read {error.filename or model_dir}: {error.strerror}.") from error
    except ValueError as error:
        raise SetupError(f"{model_dir / 'config.json'} is not valid JSON: {error}.") from error
    return digest.hexdigest()


def _samples(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The header of a safetensors file, then some bytes of each tensor."""
    header_bytes = int.from_bytes(file.read(8), "little")
    if header_bytes > _MAX_HEADER_BYTES:
        raise SetupError(
            f"{path} is not a readable safetensors file: its header has {header_bytes} bytes (limit "
            f"{_MAX_HEADER_BYTES})."
        )
    header = file.read(header_bytes)
    yield header
    try:
        tensors = json.loads(header)
        offsets = [tensor["data_offsets"] for name, tensor in tensors.items() if name != "__metadata__"]
        middles = [sum(map(as_integer, pair)) // 2 for pair in offsets]
        if any(middle > _MAX_OFFSET for middle in middles):
            raise ValueError("a tensor ends beyond any file")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, MemoryError) as error:
        raise SetupError(f"{path} is not a readable safetensors file: its header is damaged.") from error
    for middle in sorted(middles):
        file.seek(8 + header_bytes + max(0, middle))
        yield file.read(_SAMPLE_BYTES)
