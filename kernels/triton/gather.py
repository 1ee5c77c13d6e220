"""Gathers rows of a table: embeddings of token ids, and rows of the hidden state whose logits are wanted."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Columns of a program.
_BLOCK = 1024


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """table[index]. table: [num_table_rows, width], rows at any stride; index: int64 [num_rows].

    Indices come in any order and may repeat; the caller makes sure that they are within the table. The result is
    contiguous.
    """
    assert table.dim() == 2
    assert table.stride(1) == 1
    assert index.dim() == 1
    assert index.dtype == torch.int64
    assert index.is_contiguous()
    num_rows, width = index.shape[0], table.shape[1]
    out = torch.empty((num_rows, width), dtype=table.dtype, device=table.device)
    if out.numel() == 0:
        return out
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    _gather_rows_kernel[grid](
        table, index, out, width, table.stride(0), block=_BLOCK, num_warps=4, enable_fp_fusion=False
    )
    return out


@triton.jit
def _gather_rows_kernel(table, index, out, width, table_row_stride, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    source = tl.load(index + row)
    values = tl.load(table + source * table_row_stride + columns, mask=inside)
    tl.store(out + row * width + columns, values, mask=inside)
