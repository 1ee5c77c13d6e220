"""Reads weights into the memory of a GPU: one allocation, filled by several threads through pinned buffers.

Each thread reads a piece of a file into one of its two buffers while the other one is copied to the GPU, so that
neither files nor bus wait. Matrices that are multiplied together adjoin from the start.
"""

from __future__ import annotations

import os
import queue
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pdserve.base.errors import SetupError
from pdserve.model.sharding import Shard
from pdserve.model.stored_tensors import FileVersion, StoredTensor

_READERS = 8
#: Size of a buffer, of which a reader has two: large beside what a call costs, small beside what pinning them takes.
_BUFFER_BYTES = 4 << 20
#: Tensors that do not adjoin another one start at a multiple of it, as separate allocations do.
_ALIGNMENT_BYTES = 512
#: Modules whose tensors adjoin in this order.
_ADJOINING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
#: As `pdserve.model.stored_tensors.ITEM_BYTES`.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    path: Path
    descriptor: int

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fills the buffer. Raises `SetupError`."""
        while buffer:
            try:
                count = os.preadv(self.descriptor, [buffer], offset)
            except OSError as error:
                raise SetupError(f"Cannot read {self.path}: {error.strerror}.") from error
            if not count:
                raise SetupError(f"{self.path} became shorter while it was read.")
            buffer, offset = buffer[count:], offset + count


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """Rows of a tensor, read at once. Where ranks split the columns, all of them are read: they are one range."""

    file: _File
    offset: int
    dtype: torch.dtype
    #: Elements of a whole row.
    row_length: int
    #: The rank's part of each row.
    columns: slice
    #: [rows, columns] on the device.
    into: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return len(self.into) * self.row_length * self.dtype.itemsize


def read_to_device(
    stored: Mapping[str, StoredTensor], shards: Mapping[str, Shard], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The shards by name, on a CUDA device: contiguous, in one allocation, converted to `dtype` there.

    Raises:
        SetupError: for a file that cannot be read, or became shorter.
        torch.OutOfMemoryError: the device has too little memory.
    """
    positions, length = plan_arena(shards, alignment=_ALIGNMENT_BYTES // dtype.itemsize)
    arena = torch.empty(length, dtype=dtype, device=device)
    tensors = {name: _view(arena[at:], shards[name]) for name, at in positions.items()}
    with ExitStack() as stack:
        files: dict[Path, _File] = {}
        for tensor in map(stored.__getitem__, shards):
            if tensor.path not in files:
                files[tensor.path] = _opened(tensor, stack)
        pieces = [
            piece
            for name, tensor in tensors.items()
            for piece in _pieces(files[stored[name].path], stored[name], shards[name], tensor)
        ]
        _read_all(pieces, device)
    if any(piece.dtype != dtype for piece in pieces):
        torch.cuda.empty_cache()  # What the readers' streams converted in would serve no other stream.
    return tensors


def plan_arena(shards: Mapping[str, Shard], *, alignment: int) -> tuple[dict[str, int], int]:
    """Where in an allocation each shard starts, in its order there, and the length of the allocation: all in elements.

    Shards that are multiplied together adjoin; others start at multiples of `alignment`.
    """
    positions: dict[str, int] = {}
    end = 0
    for first in shards:
        if first in positions:
            continue
        end = -(-end // alignment) * alignment
        for name in _adjoining(first):
            if name in shards:
                positions[name] = end
                end += prod(_shape(shards[name]))
    return positions, end


def _adjoining(name: str) -> Iterable[str]:
    """The tensors that adjoin, among them this one, in their order."""
    *parents, module, kind = name.split(".")
    modules = next((group for group in _ADJOINING if module in group), (module,))
    return (".".join((*parents, each, kind)) for each in modules)


def _shape(shard: Shard) -> tuple[int, ...]:
    return tuple(each.stop - each.start for each in shard)


def _view(memory: Tensor, shard: Shard) -> Tensor:
    shape = _shape(shard)
    return memory[: prod(shape)].view(shape)


def _opened(stored: StoredTensor, stack: ExitStack) -> _File:
    try:
        descriptor = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SetupError(f"Cannot read {stored.path}: {error.strerror}.") from error
    stack.callback(os.close, descriptor)
    if FileVersion.of(descriptor) != stored.version:
        raise SetupError(f"{stored.path} was replaced while it was read. Start the worker again.")
    return _File(path=stored.path, descriptor=descriptor)


def _pieces(file: _File, stored: StoredTensor, shard: Shard, into: Tensor) -> Iterator[_Piece]:
    row_length, dtype = prod(stored.shape[1:]), _DTYPES[stored.dtype]
    row_bytes = row_length * dtype.itemsize
    columns = shard[1] if len(shard) > 1 else slice(0, 1)
    into = into.view(-1, columns.stop - columns.start)
    num_rows = max(1, _BUFFER_BYTES // row_bytes)
    for start in range(0, len(into), num_rows):
        yield _Piece(
            file=file,
            offset=stored.offset + (shard[0].start + start) * row_bytes,
            dtype=dtype,
            row_length=row_length,
            columns=columns,
            into=into[start : start + num_rows],
        )


def _read_all(pieces: Sequence[_Piece], device: torch.device) -> None:
    """Returns when all pieces are on the device. Raises an error of a reader once all of them have ended."""
    waiting: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
    for piece in pieces:
        waiting.put(piece)
    # What had the memory before may still be used by work of this stream.
    free = torch.cuda.current_stream(device).record_event()
    num_bytes = max(piece.num_bytes for piece in pieces)
    with ThreadPoolExecutor(_READERS, thread_name_prefix="weights") as threads:
        reading = [
            threads.submit(_load_until_empty, waiting, free, device, num_bytes)
            for _ in range(min(_READERS, len(pieces)))
        ]
    for each in reading:
        each.result()


class _Buffer:
    """Pinned memory, which is filled again once it has been copied to the device."""

    def __init__(self, num_bytes: int) -> None:
        self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def load(self, piece: _Piece) -> None:
        """Reads a piece, and launches its copy on the current stream."""
        self._copied.synchronize()
        source = self._fill(piece)
        if source.dtype != piece.into.dtype:  # Converted on the device.
            source = source.to(piece.into.device, non_blocking=True)
        piece.into.copy_(source, non_blocking=True)
        self._copied.record()

    def _fill(self, piece: _Piece) -> Tensor:
        """Pinned, with the file's dtype: [rows, columns]."""
        if piece.columns == slice(0, piece.row_length):
            return _read_rows(piece, self._pinned)
        rows = _read_rows(piece, torch.empty(piece.num_bytes, dtype=torch.uint8))
        num_bytes = piece.into.numel() * piece.dtype.itemsize
        return self._pinned[:num_bytes].view(piece.dtype).view(piece.into.shape).copy_(rows[:, piece.columns])


def _read_rows(piece: _Piece, memory: Tensor) -> Tensor:
    """Whole rows, in host memory of uint8: [rows, row_length]."""
    memory = memory[: piece.num_bytes]
    buffer: Any = memory.numpy()
    piece.file.read(piece.offset, memoryview(buffer))
    return memory.view(piece.dtype).view(-1, piece.row_length)


def _load_until_empty(
    waiting: queue.SimpleQueue[_Piece], free: torch.cuda.Event, device: torch.device, num_bytes: int
) -> None:
    """One reader, on a stream of its own. After an error, the others find nothing left either."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        stream.wait_event(free)
        try:
            buffers = cycle([_Buffer(num_bytes), _Buffer(num_bytes)])
            for piece, buffer in zip(_taken(waiting), buffers, strict=False):
                buffer.load(piece)
        finally:
            deque(_taken(waiting), maxlen=0)
            stream.synchronize()


def _taken(waiting: queue.SimpleQueue[_Piece]) -> Iterator[_Piece]:
    with suppress(queue.Empty):
        while True:
            yield waiting.get_nowait()
