"""Turns a `StepPlan` into the `Batch` the model takes: vectors over buffers that live as long as the worker.

Rows come in the order of the plan, one for each decoding sequence and then those of the chunks:

decoding  b     c     chunks  a .........
row       0     1             2   3   4
position  7     5             0   1   2
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.step import StepPlan
from pdserve.model.batch import Batch

Ints = npt.NDArray[np.int64]

#: Elements that a buffer has at least, so that it hardly ever grows.
_SMALLEST_BUFFER = 1024


class BatchBuilder:
    """A batch is valid until the next one is built: its tensors are views of the builder's buffers."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._buffers = _Buffers()
        self._tables = _TableMirror(self._buffers)
        self._batch: Batch | None = None
        #: What the views of `_batch` were cut by: while it stays the same, so do they.
        self._cut: tuple[int, ...] = ()

    def build(self, plan: StepPlan) -> Batch:
        """Logits are wanted for each decoding sequence, and for the last row of each chunk that has samples."""
        take, num_decoding = self._buffers.take, len(plan.decoding)
        num_tokens = num_decoding + plan.num_prefill_tokens
        num_sequences = num_decoding + len(plan.chunks)
        token_ids, positions = take("token_ids", num_tokens), take("positions", num_tokens)
        query_starts, context_lens = take("query_starts", num_sequences + 1), take("context_lens", num_sequences)
        sequence_of_row = take("sequence_of_row", num_tokens)

        token_ids[:num_decoding] = [sequence.tokens[-1] for sequence in plan.decoding]
        positions[:num_decoding] = [sequence.num_computed for sequence in plan.decoding]
        np.add(positions[:num_decoding], 1, out=context_lens[:num_decoding])
        sequence_of_row[:num_decoding] = query_starts[:num_decoding] = self._buffers.counting(num_decoding)
        first = num_decoding
        for index, chunk in enumerate(plan.chunks, num_decoding):
            rows = slice(first, first + chunk.stop - chunk.start)
            token_ids[rows] = chunk.sequence.tokens[chunk.start : chunk.stop]
            positions[rows] = self._buffers.counting(chunk.stop)[chunk.start :]
            sequence_of_row[rows] = index
            query_starts[index], context_lens[index] = first, chunk.stop
            first = rows.stop
        query_starts[num_sequences] = first

        blocks, offsets = np.divmod(positions, self._block_size)
        tables = [sequence.block_table for sequence in plan.scheduled()]
        block_tables = self._tables.take(tables, (context_lens - 1) // self._block_size + 1)
        slot_mapping = take("slot_mapping", num_tokens)
        np.multiply(block_tables[sequence_of_row, blocks], self._block_size, out=slot_mapping)
        slot_mapping += offsets
        sampled = [index for index, chunk in enumerate(plan.chunks, num_decoding + 1) if chunk.samples]
        logits_rows = take("logits_rows", num_decoding + len(sampled))
        logits_rows[:num_decoding] = query_starts[:num_decoding]
        logits_rows[num_decoding:] = query_starts[sampled] - 1
        return self._batch_of(token_ids, positions, slot_mapping, query_starts, context_lens, block_tables, logits_rows)

    def _batch_of(self, *arrays: Ints) -> Batch:
        """Tensors over the arrays, which are those of `Batch` in order; the last step's when nothing moved."""
        cut = (self._buffers.version, *(array.size for array in arrays))
        if self._batch is None or cut != self._cut:
            names = Batch.__dataclass_fields__
            self._batch = Batch(**{name: torch.from_numpy(array) for name, array in zip(names, arrays, strict=True)})
            self._cut = cut
        return self._batch


class _Buffers:
    """Named int64 memory that grows when it has to and never shrinks."""

    def __init__(self) -> None:
        self._arrays: dict[str, Ints] = {}
        self._counting = np.arange(_SMALLEST_BUFFER)
        #: Another one whenever memory moved.
        self.version = 0

    def take(self, name: str, size: int) -> Ints:
        """The first `size` elements of a buffer, with whatever they hold."""
        held = self._arrays.get(name)
        if held is None or len(held) < size:
            held = self._arrays[name] = np.zeros(max(2 * size, _SMALLEST_BUFFER), np.int64)
            self.version += 1
        return held[:size]

    def counting(self, stop: int) -> Ints:
        """0 .. stop - 1, to be read only."""
        if len(self._counting) < stop:
            self._counting = np.arange(2 * stop)
        return self._counting[:stop]


class _TableMirror:
    """The block tables of a step's sequences as rows of one array, kept from step to step.

    A table only grows, and any other change of it makes a new table (`BlockManager`). So while the tables are those of
    the last step, only what was appended to them has to be copied.
    """

    def __init__(self, buffers: _Buffers) -> None:
        self._buffers = buffers
        self._tables: list[array[int]] = []
        #: Blocks of each row that are copied.
        self._copied: Ints = np.zeros(0, np.int64)
        self._rows: Ints = np.zeros((0, 0), np.int64)

    def take(self, tables: list[array[int]], num_blocks: Ints) -> Ints:
        """The first `num_blocks` of each table: [num_tables, at least the largest of num_blocks], padded with 0."""
        if tables != self._tables or num_blocks.max() > self._rows.shape[1]:
            self._restart(tables, num_blocks)
        for index in (num_blocks > self._copied).nonzero()[0].tolist():
            start, stop = self._copied[index], num_blocks[index]
            self._rows[index, start:stop] = tables[index][start:stop]
            self._copied[index] = stop
        return self._rows

    def _restart(self, tables: list[array[int]], num_blocks: Ints) -> None:
        width = int(num_blocks.max())
        self._tables = tables
        self._copied = np.zeros(len(tables), np.int64)
        self._rows = self._buffers.take("block_tables", len(tables) * width).reshape(len(tables), width)
        self._rows.fill(0)
