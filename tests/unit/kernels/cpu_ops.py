"""Helpers for tests of single C++ ops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.choice import instruction_sets
from kernels.cpu import native
from kernels.cpu.ops import CpuOps, PackedMatrix, Rows, format_of
from kernels.ops import KvRows

INSTRUCTION_SETS = instruction_sets()
FORMATS = ("bf16", "f32", "int8")
NAN = float("nan")

_why_not = native.missing_reason()
needs_kernels = pytest.mark.skipif(_why_not is not None, reason=f"C++ kernels: {_why_not}")
on_every_instruction_set = pytest.mark.parametrize("isa", INSTRUCTION_SETS)
in_every_format = pytest.mark.parametrize("name", FORMATS)


def dtype_of(name: str) -> torch.dtype:
    """The dtype from which weights of a format are packed."""
    return torch.float32 if name == "f32" else torch.bfloat16


def rows_of(ops: CpuOps, x: Tensor, name: str) -> Rows:
    """x as rows to multiply, in memory with other contents before."""
    rows = Rows.empty(*x.shape, format_of(dtype_of(name), int8=name == "int8"))
    # NaN in bfloat16 and float32.
    rows.units.fill_(-1)
    rows.low.fill_(-1)
    rows.scale.fill_(NAN)
    ops.to_rows(x, rows)
    return rows


def values_of(rows: Rows, name: str) -> Tensor:
    """The numbers that rows hold, float64 [num_rows, width]."""
    if name == "int8":
        high, low = (half.view(torch.uint8)[:, : rows.width].double() for half in (rows.units, rows.low))
        return (256 * (high - 128) + low) * rows.scale.double()[:, None]
    return rows.units.view(dtype_of(name))[:, : rows.width].double()


def product(ops: CpuOps, rows: Rows, matrix: PackedMatrix) -> Tensor:
    """Rows times a matrix, padding included, float32 [num_rows, num_columns]; asserts that nothing else is written."""
    num_rows = len(rows.units)
    memory = torch.full((num_rows + 2, matrix.num_columns + 5), NAN)
    out = memory[1:-1]
    (ops.multiply_silu if matrix.interleaved else ops.multiply)(rows, [matrix], out)
    assert memory[0].isnan().all()
    assert memory[-1].isnan().all()
    assert out[:, matrix.num_columns :].isnan().all()
    return out[:, : matrix.num_columns]


def kv_rows(spans: list[tuple[int, int]], block_size: int, first_block: int = 1) -> KvRows:
    """Sequences given as (rows, context), with blocks of their own; entries beyond a context are invalid."""
    width = max(-(-context // block_size) for _, context in spans) + 1
    tables, positions, slots, starts = [], [], [], [0]
    block = first_block
    for num_rows, context in spans:
        # In reverse, since a sequence's blocks may be anywhere.
        blocks = list(range(block, block + -(-context // block_size)))[::-1]
        block += len(blocks)
        tables.append(blocks + [1 << 40] * (width - len(blocks)))
        new_positions = range(context - num_rows, context)
        positions += new_positions
        slots += [blocks[p // block_size] * block_size + p % block_size for p in new_positions]
        starts.append(starts[-1] + num_rows)
    return KvRows(
        positions=torch.tensor(positions),
        slot_mapping=torch.tensor(slots),
        query_starts=torch.tensor(starts),
        context_lens=torch.tensor([context for _, context in spans]),
        block_tables=torch.tensor(tables),
    )
