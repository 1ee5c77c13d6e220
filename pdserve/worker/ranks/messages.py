"""Messages from rank 0 to its followers, as int64 numbers over local sockets: kind, number, count, values.

Each follower has two sockets: one for steps, in order and without replies, and one for copies between blocks and the
slots of the stage, each of which is answered when it is done.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvtransfer.handover.memory import Bundle
from pdserve.base.ids import BlockId
from pdserve.engine.device_batch import BatchShape
from pdserve.model.batch import TENSORS, Batch

_HEADER = 3
HEADER_BYTES = 8 * _HEADER
_SHAPE = 5
#: Flags, as bits of the last of the `_SHAPE` numbers.
_REPORTS_LAYERS, _HIDDEN_ONLY = 1, 2
#: `StepPosition.num_layers` of a whole step.
ALL_LAYERS = 1 << 30


class StepPosition(NamedTuple):
    """Progress of steps: this many layers of the step are written, and all earlier steps are."""

    step: int
    num_layers: int = ALL_LAYERS


class MessageKind(IntEnum):
    """The kinds of messages. A message carries the number of a step."""

    #: Values: the shape, flags, and the batch.
    FORWARD = 1
    #: Values: source and destination of each copy within the cache.
    COPY_BLOCKS = 2
    #: Values: layers of the step that must be written, first and last layer to copy. Then for each bundle: its number
    #: of blocks, its first slot, and the blocks.
    READ_BLOCKS = 3
    #: The same values, for a copy from slots to blocks.
    WRITE_BLOCKS = 4
    #: The reply to a copy. No values.
    DONE = 5
    #: Record one more graph. Values: `is_idle` of `pdserve.engine.runner.RecordNext`.
    RECORD = 6


@dataclass(frozen=True, slots=True)
class RankMessage:
    """One message. `values`: int64 [count], valid until the next message is received."""

    kind: MessageKind
    number: int
    values: Tensor

    def batch(self) -> Batch:
        """The batch of a `FORWARD`."""
        num_tokens, num_sequences, num_blocks, num_logits, _ = self.values[:_SHAPE].tolist()
        shape = BatchShape(
            num_tokens=num_tokens, num_sequences=num_sequences, num_blocks=num_blocks, num_logits=num_logits
        )
        return replace(shape.views(self.values[_SHAPE:]), hidden_only=bool(self._flags & _HIDDEN_ONLY))

    @property
    def reports_layers(self) -> bool:
        """Whether a `FORWARD` reports each layer."""
        return bool(self._flags & _REPORTS_LAYERS)

    @property
    def _flags(self) -> int:
        return int(self.values[_SHAPE - 1])

    def copy(self) -> CopyRequest:
        """The request of a `READ_BLOCKS` or `WRITE_BLOCKS`."""
        num_layers, start, stop, *rest = self.values.tolist()
        bundles, slots = [], []
        values = iter(rest)
        for size in values:
            slots.append(next(values))
            bundles.append([BlockId(next(values)) for _ in range(size)])
        return CopyRequest(
            bundles=bundles, slots=slots, layers=slice(start, stop), after=StepPosition(self.number, num_layers)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyRequest:
    """Layers of bundles to copy, and each bundle's first slot. The copy may start once steps have reached `after`."""

    bundles: Sequence[Bundle]
    slots: Sequence[int]
    layers: slice
    after: StepPosition

    def encode(self, kind: MessageKind) -> bytes:
        """The request as a message of that kind."""
        values = [self.after.num_layers, self.layers.start, self.layers.stop]
        for bundle, slot in zip(self.bundles, self.slots, strict=True):
            values += [len(bundle), slot, *bundle]
        return encode(kind, self.after.step, values)


def encode(kind: MessageKind, number: int, values: Sequence[int] = ()) -> bytes:
    """A message with few values."""
    return np.array([kind, number, len(values), *values], np.int64).tobytes()


def reply_to(request: bytes) -> bytes:
    """The reply that reports the requested copy as done."""
    _, number = np.frombuffer(request, np.int64, 2).tolist()
    return encode(MessageKind.DONE, number)


class StepWriter:
    """Sends steps to all followers, from one thread."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = sockets
        self._memory = torch.zeros(1024, dtype=torch.int64)

    def forward(self, number: int, batch: Batch, *, reports_layers: bool = False) -> None:
        """Sends a batch. Raises `OSError` when a follower is gone."""
        shape = BatchShape.of(batch)
        values = self._values(MessageKind.FORWARD, number, _SHAPE + shape.num_elements)
        flags = _REPORTS_LAYERS * reports_layers | _HIDDEN_ONLY * batch.hidden_only
        sizes = (shape.num_tokens, shape.num_sequences, shape.num_blocks, shape.num_logits, flags)
        values[:_SHAPE] = torch.tensor(sizes)
        views = shape.views(values[_SHAPE:])
        for name in TENSORS:
            getattr(views, name).copy_(getattr(batch, name))
        self._send(len(values))

    def copy_blocks(self, number: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Sends copies between blocks. Raises `OSError` when a follower is gone."""
        values = self._values(MessageKind.COPY_BLOCKS, number, 2 * len(pairs))
        values[:] = torch.tensor(pairs).view(-1)
        self._send(len(values))

    def record(self, number: int, *, is_idle: bool) -> None:
        """Sends the recording of a graph. Raises `OSError` when a follower is gone."""
        values = self._values(MessageKind.RECORD, number, 1)
        values[0] = int(is_idle)
        self._send(len(values))

    def _values(self, kind: MessageKind, number: int, count: int) -> Tensor:
        if _HEADER + count > len(self._memory):
            self._memory = torch.zeros(2 * (_HEADER + count), dtype=torch.int64)
        self._memory[:_HEADER] = torch.tensor((kind, number, count))
        return self._memory[_HEADER : _HEADER + count]

    def _send(self, count: int) -> None:
        message = _bytes(self._memory[: _HEADER + count])
        for stream in self._sockets:
            stream.sendall(message)


class MessageReader:
    """A follower's end of a socket."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._memory = torch.zeros(1024, dtype=torch.int64)

    def receive(self) -> RankMessage | None:
        """Waits for the next message. None when rank 0 has closed the stream or is gone."""
        if not self._fill(_HEADER):
            return None
        kind, number, count = self._memory[:_HEADER].tolist()
        if count > len(self._memory):
            self._memory = torch.zeros(2 * count, dtype=torch.int64)
        if not self._fill(count):
            return None
        return RankMessage(MessageKind(kind), number, self._memory[:count])

    def _fill(self, count: int) -> bool:
        left = _bytes(self._memory[:count])
        while left:
            received = self._stream.recv_into(left)
            if not received:
                return False
            left = left[received:]
        return True


def _bytes(memory: Tensor) -> memoryview:
    array: npt.NDArray[np.uint8] = memory.numpy().view(np.uint8)
    return array.data
