"""Where each tensor of a safetensors file lies. No torch.

Source: https://github.com/huggingface/safetensors, "Format": the header's size, the header as JSON, then the bytes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from operator import index as as_integer
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.base.errors import SetupError
from pdserve.model.tensors import Shape

_MAX_HEADER_BYTES = 100_000_000
#: Bytes of an element, by the files' names for the supported dtypes. Any other (int8, fp8) means a quantized model.
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}


class FileVersion(NamedTuple):
    """Differs between a file and another one in its place, or a changed one."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, descriptor: int) -> FileVersion:
        """That of an open file."""
        status = os.fstat(descriptor)
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor of a file, row by row without gaps."""

    path: Path
    version: FileVersion
    #: The name that files have for it.
    dtype: str
    shape: Shape
    #: Position in the file of its first byte.
    offset: int


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Raises `OSError`, and `SetupError` for a file that is damaged or cut off."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > _MAX_HEADER_BYTES:
            raise SetupError(
                f"{path} is not a readable safetensors file: its header has {size} bytes (limit {_MAX_HEADER_BYTES})."
            )
        header, version = file.read(size), FileVersion.of(file.fileno())
    try:
        entries = json.loads(header).items()
        return {name: _stored(path, version, 8 + size, entry) for name, entry in entries if name != "__metadata__"}
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, MemoryError):
        raise SetupError(
            f"{path} is not a readable safetensors file: its header is damaged, or the file is cut off."
        ) from None


def _stored(path: Path, version: FileVersion, start: int, entry: Mapping[str, Any]) -> StoredTensor:
    """`start`: of all tensors in the file. Raises one of several built-in errors for a damaged entry."""
    dtype, shape = str(entry["dtype"]), tuple(as_integer(length) for length in entry["shape"])
    first, last = (start + as_integer(offset) for offset in entry["data_offsets"])
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else last - first
    if min(shape, default=0) < 0 or not start <= first <= last <= version.size or last - first != num_bytes:
        raise ValueError(f"tensor of {dtype} {shape} at {first}")
    return StoredTensor(path=path, version=version, dtype=dtype, shape=shape, offset=first)
