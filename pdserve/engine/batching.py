"""Turns a `StepPlan` into the `Batch` the model takes: ids are copied by sequence, the rest is array arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.engine.step import Chunk, StepPlan
from pdserve.model.batch import Batch

_Ints = npt.NDArray[np.int64]


def build_batch(plan: StepPlan, block_size: int, device: torch.device) -> Batch:
    """The rows of all chunks, one sequence after the other, in the plan's order.

    Logits are wanted for the last row of each chunk that has samples; see `logits_rows_of`.
    """
    chunks = plan.chunks
    starts = np.fromiter((chunk.start for chunk in chunks), np.int64, len(chunks))
    stops = np.fromiter((chunk.stop for chunk in chunks), np.int64, len(chunks))
    query_starts = np.zeros(len(chunks) + 1, np.int64)
    np.cumsum(stops - starts, out=query_starts[1:])
    sequence_of_row = np.repeat(np.arange(len(chunks)), stops - starts)
    positions = np.arange(query_starts[-1]) - (query_starts[:-1] - starts)[sequence_of_row]
    block_tables = _make_block_tables(chunks, -(-stops // block_size))
    blocks = block_tables[sequence_of_row, positions // block_size]
    wanted = np.fromiter((bool(chunk.samples) for chunk in chunks), np.bool_, len(chunks))

    def to_device(values: _Ints) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Batch(
        token_ids=to_device(_make_token_ids(chunks, int(query_starts[-1]))),
        positions=to_device(positions),
        slot_mapping=to_device(blocks * block_size + positions % block_size),
        query_starts=to_device(query_starts),
        context_lens=to_device(stops),
        block_tables=to_device(block_tables),
        logits_rows=to_device(query_starts[1:][wanted] - 1),
    )


def logits_rows_of(plan: StepPlan) -> list[int]:
    """For each `SampleRow` of the plan, in order, the row of the logits it is drawn from; n choices can share one."""
    sampling = [chunk for chunk in plan.chunks if chunk.samples]
    return [row for row, chunk in enumerate(sampling) for _ in chunk.samples]


def _make_token_ids(chunks: tuple[Chunk, ...], num_tokens: int) -> _Ints:
    if len(chunks) == num_tokens:  # one token each: the usual decode step
        return np.fromiter((chunk.sequence.tokens[chunk.start] for chunk in chunks), np.int64, num_tokens)
    return np.concatenate([np.asarray(chunk.sequence.tokens[chunk.start : chunk.stop]) for chunk in chunks])


def _make_block_tables(chunks: tuple[Chunk, ...], num_blocks: _Ints) -> _Ints:
    """int64 [num_sequences, largest num_blocks], padded with 0."""
    tables = np.zeros((len(chunks), num_blocks.max()), np.int64)
    for row, chunk, count in zip(tables, chunks, num_blocks.tolist(), strict=True):
        row[:count] = chunk.sequence.block_table[:count]
    return tables
