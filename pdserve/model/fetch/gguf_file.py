"""Reads the header of a GGUF file without trusting it, and dequantizes its tensors. No torch.

`gguf.GGUFReader` would loop forever on a forged array length, and takes seconds for a real vocabulary. So the header is
parsed here; block formats and dequantization are those of the `gguf` package.
Source: the GGUF specification, https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.base.errors import SetupError
from pdserve.model.fields import Fields

if TYPE_CHECKING:
    import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_MAX_DIMENSION = 2**31 - 1
_MAX_ALIGNMENT = 2**20
#: Far above real headers, whose vocabularies have some MB. Python's objects take up to eight times as much.
_MAX_HEADER_BYTES = 128 << 20
_MAX_ARRAY_ITEMS = 1 << 22
_MAX_TENSORS = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """Location and type of a tensor in the file; `shape` is in row-major order, as in numpy and torch."""

    name: str
    type_id: int
    type_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GgufFile:
    """A mapped file with a checked header: `metadata`, and `tensors` by name, all within the file."""

    def __init__(self, path: Path) -> None:
        """Raises `SetupError` when the file cannot be read, is not GGUF, or contradicts its header."""
        self.path = path
        if path.exists() and not path.is_file():
            raise SetupError(f"Cannot read {path}: it is not a regular file. Replace it with one.")
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise SetupError(f"Cannot read {path}: {error.strerror}.") from error
        except ValueError as error:
            raise SetupError(f"{path} is empty.") from error
        cursor = _Cursor(self._data, path)
        if cursor.take(4) != _MAGIC:
            raise SetupError(f"{path} is not a GGUF file.")
        version = cursor.scalar("I")
        if version not in _VERSIONS:
            raise SetupError(f"{path}: GGUF version {version} is not supported; supported: 2, 3 (little-endian).")
        num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
        values: dict[str, object] = {}
        for _ in range(num_values):
            key = cursor.text()
            values[key] = cursor.value(cursor.scalar("I"))
        self.metadata = Fields(values, str(path))
        self.tensors = self._read_tensors(cursor, num_tensors)

    def _read_tensors(self, cursor: _Cursor, count: int) -> dict[str, GgufTensor]:
        if count > _MAX_TENSORS:
            raise SetupError(f"{self.path} has {count} tensors (limit {_MAX_TENSORS}); the file is damaged.")
        infos = [_read_info(cursor) for _ in range(count)]
        alignment = self.metadata.integer("general.alignment", 32)
        if alignment > _MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.metadata.wrong("general.alignment", "a power of two")
        start = -(-cursor.position // alignment) * alignment
        tensors = {info.name: _located(info, start, len(self._data), self.path) for info in infos}
        if len(tensors) != count:
            raise SetupError(f"{self.path} has two tensors of the same name; the file is damaged.")
        return tensors

    def array(self, name: str) -> np.ndarray:
        """The tensor dequantized to float32. Raises `SetupError` for an unsupported type, and for NaN or infinity."""
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            values: np.ndarray = dequantize(rows, GGMLQuantizationType(tensor.type_id)).reshape(tensor.shape)
        except NotImplementedError as error:
            raise SetupError(
                f"{self.path}: {name} has type {tensor.type_name}, which is not supported. Use another quantization."
            ) from error
        if not np.isfinite(values).all():
            raise SetupError(f"{self.path}: {name} has values that are not finite; the file is damaged.")
        return values


class _Cursor:
    """Reads little-endian values in sequence, never beyond the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0
        self._num_items = 0

    def take(self, count: int) -> bytes:
        if self.position + count > _MAX_HEADER_BYTES:
            raise SetupError(f"{self._path} has a header above {_MAX_HEADER_BYTES} bytes; the file is damaged.")
        if count > len(self._data) - self.position:
            raise SetupError(f"{self._path} ends within its header; the file is damaged.")
        start = self.position
        self.position += count
        return self._data[start : self.position]

    def scalar(self, code: str) -> int:
        return int(struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0])

    def text(self) -> str:
        try:
            return self.take(self.scalar("Q")).decode()
        except UnicodeDecodeError as error:
            raise SetupError(f"{self._path} has text in its header that is not UTF-8; the file is damaged.") from error

    def value(self, type_id: int) -> object:
        if type_id == _STRING:
            return self.text()
        if type_id != _ARRAY:
            return self._scalars(type_id, 1)[0]
        item_type, count = self.scalar("I"), self.scalar("Q")
        self._num_items += count
        if self._num_items > _MAX_ARRAY_ITEMS:
            raise SetupError(f"{self._path} has more than {_MAX_ARRAY_ITEMS} items in its header; the file is damaged.")
        if item_type == _STRING:
            return [self.text() for _ in range(count)]
        return self._scalars(item_type, count)

    def _scalars(self, type_id: int, count: int) -> list[int | float | bool]:
        code = _SCALARS.get(type_id)
        if code is None:
            raise SetupError(f"{self._path} has a header value of type {type_id}, which is not in the specification.")
        body = self.take(count * struct.calcsize(f"<{code}"))
        return list(struct.unpack(f"<{count}{code}", body))


def _read_info(cursor: _Cursor) -> GgufTensor:
    """A tensor's entry in the header, checked by itself; its location is not checked yet."""
    name = cursor.text()
    num_dimensions = cursor.scalar("I")
    if not 0 < num_dimensions <= _MAX_DIMENSIONS:
        raise SetupError(f"GGUF tensor {name} has {num_dimensions} dimensions, but must have 1 to {_MAX_DIMENSIONS}.")
    shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dimensions)]))
    if not all(0 < size <= _MAX_DIMENSION for size in shape):
        raise SetupError(
            f"GGUF tensor {name} has shape {list(shape)}, but each dimension must be between 1 and {_MAX_DIMENSION}."
        )
    type_id, offset = cursor.scalar("I"), cursor.scalar("Q")
    return GgufTensor(name=name, type_id=type_id, type_name="", shape=shape, offset=offset, num_bytes=0)


def _located(info: GgufTensor, start: int, file_bytes: int, path: Path) -> GgufTensor:
    """The tensor with its absolute offset and its size, checked against the size of the file."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        kind = GGMLQuantizationType(info.type_id)
    except ValueError as error:
        raise SetupError(f"{path}: {info.name} has type {info.type_id}, which is not in the specification.") from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if info.shape[-1] % block:
        raise SetupError(
            f"{path}: rows of {info.name} have {info.shape[-1]} elements, but must have a multiple of {block} for "
            f"{kind.name} blocks; the file is damaged."
        )
    elements = 1
    for size in info.shape:
        elements *= size
    num_bytes = elements // block * block_bytes
    if start + info.offset + num_bytes > file_bytes:
        raise SetupError(f"{path}: {info.name} extends beyond the end of the file. Was the download interrupted?")
    return GgufTensor(
        name=info.name,
        type_id=info.type_id,
        type_name=kind.name,
        shape=info.shape,
        offset=start + info.offset,
        num_bytes=num_bytes,
    )
