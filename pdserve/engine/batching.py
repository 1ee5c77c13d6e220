"""Turns a `StepPlan` into the model's `Batch`: tensors over buffers that live as long as the worker.

Rows come in the order of the plan, one for each decoding sequence and then those of the chunks:

decoding  b     c     chunks  a .........
row       0     1             2   3   4
position  7     5             0   1   2
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.step import StepPlan
from pdserve.model.batch import Batch

Ints = npt.NDArray[np.int64]

#: Smallest size of a buffer in elements; with it, buffers hardly ever grow.
_MIN_BUFFER_SIZE = 1024


class BatchBuilder:
    """Builds batches whose tensors are views of its buffers: a batch is valid until the next one is built.

    Most steps compute the next token of the previous step's sequences. Then all fields but the tokens are advanced by
    one position in place, except in rows that enter a new block. A block table only grows, and any other change makes
    a new array (`BlockManager`). So a table that is the same array needs no comparison.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._buffers = _Buffers()
        self._rows = _Rows.of(self._buffers, num_tokens=0, num_sequences=0, num_logits=0, num_blocks=0)
        self._batch: Batch | None = None
        #: Tables and positions of the batch that would continue the current one.
        self._next_tables: list[array[int]] = []
        self._next_positions: list[int] = []

    def build(self, plan: StepPlan) -> Batch:
        """The batch of a plan, with logits of each decoding sequence, and of the rows of chunks that are sampled from.

        The tokens of a plan made ahead are not known yet, so the batch's token ids are meaningless.
        """
        tables = [sequence.block_table for sequence in plan.scheduled()]
        positions = [sequence.num_computed for sequence in plan.decoding]
        if plan.is_ahead:
            positions = [position + 1 for position in positions]
        continues = not plan.chunks and positions == self._next_positions and tables == self._next_tables
        self._next_positions = []  # Until this batch is complete, nothing continues it.
        if not (continues and self._advance(tables, positions)):
            self._rebuild(plan, tables, positions)
        self._rows.token_ids[: len(positions)] = [sequence.tokens[-1] for sequence in plan.decoding]
        self._next_tables = tables
        self._next_positions = [] if plan.chunks else [position + 1 for position in positions]
        assert self._batch is not None
        return self._batch

    def _advance(self, tables: list[array[int]], positions: list[int]) -> bool:
        """Advance every row by one position; False when a table has become wider than the buffer's rows."""
        rows, block_size = self._rows, self._block_size
        if max(positions) // block_size >= rows.block_tables.shape[1]:
            return False
        for numbers in (rows.positions, rows.slot_mapping, rows.context_lens):
            np.add(numbers, 1, out=numbers)
        for index, position in enumerate(positions):
            if position % block_size == 0:
                block = tables[index][position // block_size]
                rows.block_tables[index, position // block_size] = block
                rows.slot_mapping[index] = block * block_size
        return True

    def _rebuild(self, plan: StepPlan, tables: list[array[int]], positions: list[int]) -> None:
        """Build all fields, except for the tokens of decoding sequences, from the plan alone."""
        num_decoding, block_size = len(plan.decoding), self._block_size
        context_lens = [*(position + 1 for position in positions), *(chunk.stop for chunk in plan.chunks)]
        num_blocks = [-(-context_len // block_size) for context_len in context_lens]
        rows = self._rows = _Rows.of(
            self._buffers,
            num_tokens=plan.num_tokens,
            num_sequences=len(tables),
            num_logits=num_decoding + sum(chunk.num_logits for chunk in plan.chunks),
            num_blocks=max(num_blocks),
        )
        rows.context_lens[:] = context_lens
        for row, table, count in zip(rows.block_tables, tables, num_blocks, strict=True):
            row[:count] = table[:count]
            row[count:] = 0
        rows.positions[:num_decoding] = positions
        rows.sequences[:num_decoding] = rows.query_starts[:num_decoding] = range(num_decoding)
        rows.logits_rows[:num_decoding] = range(num_decoding)
        first = num_logits = num_decoding
        for index, chunk in enumerate(plan.chunks, num_decoding):
            span = slice(first, first + chunk.stop - chunk.start)
            rows.token_ids[span] = chunk.sequence.tokens[chunk.start : chunk.stop]
            rows.positions[span] = range(chunk.start, chunk.stop)
            rows.sequences[span], rows.query_starts[index] = index, first
            wanted = [*range(first, first + len(chunk.scores)), *[span.stop - 1] * bool(chunk.samples)]
            wanted += [first + offset for offset in chunk.pooled_rows]
            rows.logits_rows[num_logits : num_logits + chunk.num_logits] = wanted
            first, num_logits = span.stop, num_logits + chunk.num_logits
        rows.query_starts[-1] = first
        blocks, offsets = np.divmod(rows.positions, block_size)
        rows.slot_mapping[:] = rows.block_tables[rows.sequences, blocks] * block_size + offsets
        self._batch = rows.batch(hidden_only=plan.is_pooled)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """The fields of `Batch` as arrays, and the index of each row's sequence."""

    token_ids: Ints
    positions: Ints
    slot_mapping: Ints
    query_starts: Ints
    context_lens: Ints
    block_tables: Ints
    logits_rows: Ints
    sequences: Ints

    @classmethod
    def of(cls, buffers: _Buffers, *, num_tokens: int, num_sequences: int, num_logits: int, num_blocks: int) -> _Rows:
        """Views of the buffers, with undefined content."""
        return cls(
            token_ids=buffers.take("token_ids", num_tokens),
            positions=buffers.take("positions", num_tokens),
            slot_mapping=buffers.take("slot_mapping", num_tokens),
            query_starts=buffers.take("query_starts", num_sequences + 1),
            context_lens=buffers.take("context_lens", num_sequences),
            block_tables=buffers.take("block_tables", num_sequences * num_blocks).reshape(num_sequences, num_blocks),
            logits_rows=buffers.take("logits_rows", num_logits),
            sequences=buffers.take("sequences", num_tokens),
        )

    def batch(self, *, hidden_only: bool) -> Batch:
        """Tensors over the same memory."""
        return Batch(
            token_ids=torch.from_numpy(self.token_ids),
            positions=torch.from_numpy(self.positions),
            slot_mapping=torch.from_numpy(self.slot_mapping),
            query_starts=torch.from_numpy(self.query_starts),
            context_lens=torch.from_numpy(self.context_lens),
            block_tables=torch.from_numpy(self.block_tables),
            logits_rows=torch.from_numpy(self.logits_rows),
            hidden_only=hidden_only,
        )


class _Buffers:
    """Named int64 buffers that grow on demand and never shrink."""

    def __init__(self) -> None:
        self._arrays: dict[str, Ints] = {}

    def take(self, name: str, size: int) -> Ints:
        """The first `size` elements of a buffer, with undefined content."""
        held = self._arrays.get(name)
        if held is None or len(held) < size:
            held = self._arrays[name] = np.zeros(max(2 * size, _MIN_BUFFER_SIZE), np.int64)
        return held[:size]
