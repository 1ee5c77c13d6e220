"""A model directory on disk: which files hold its weights, and the fingerprint that names its KV blocks. No torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from pdserve.base.errors import SetupError
from pdserve.model.fields import Fields

_INDEX = "model.safetensors.index.json"
#: Bytes sampled per weight file. Finetunes of one model share names, sizes and headers, but not these.
_SAMPLES = 32
_SAMPLE_BYTES = 2048
_MAX_HEADER_BYTES = 100_000_000


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files, sharded (by the index) or not. Raises `SetupError` when one is missing."""
    index = model_dir / _INDEX
    if index.exists():
        weight_map = Fields.read(index).object("weight_map")
        names = sorted({weight_map.text(tensor) for tensor in weight_map.names()})
        if any(Path(name).name != name for name in names):
            raise SetupError(f"{index} names files outside of its directory.")
    else:
        names = sorted(path.name for path in model_dir.glob("*.safetensors"))
        names = ["model.safetensors"] if "model.safetensors" in names else names
    if not names:
        raise SetupError(f"{model_dir} holds no *.safetensors file; other weight formats are not read.")
    missing = [name for name in names if not (model_dir / name).is_file()]
    if missing:
        raise SetupError(f"{model_dir} lacks {', '.join(missing)}; was the download interrupted?")
    return [model_dir / name for name in names]


def fingerprint(model_dir: Path) -> str:
    """32 hex digits, equal in every process and on every machine that holds the same model: config, names and sizes of
    the weight files, their headers, and samples of their data. Takes milliseconds. Raises `SetupError`."""
    digest = hashlib.blake2b(digest_size=16)
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
        digest.update(json.dumps(config, sort_keys=True).encode())
        for path in weight_files(model_dir):
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode())
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                if header_bytes > min(size, _MAX_HEADER_BYTES):
                    raise SetupError(f"{path} is not a safetensors file: its header does not fit.")
                digest.update(file.read(header_bytes))
                for sample in range(_SAMPLES):
                    file.seek(8 + header_bytes + (size - 8 - header_bytes) * sample // _SAMPLES)
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise SetupError(f"Cannot read {error.filename or model_dir}: {error.strerror}.") from error
    except ValueError as error:
        raise SetupError(f"{model_dir / 'config.json'} is not valid JSON: {error}.") from error
    return digest.hexdigest()
