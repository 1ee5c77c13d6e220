"""Inputs of the measured ops besides weights: sequences with blocks of their own, and tables of angles."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.bench.work import Spans
from kernels.decoder import DecoderShape
from kernels.ops import KvRows

BLOCK_SIZE = 16
_CPU = torch.device("cpu")


def kv_rows(spans: Spans, device: torch.device = _CPU, *, is_scattered: bool = False) -> KvRows:
    """Sequences with blocks of their own, from block 1 on: adjacent, or scattered as in a pool that has been used."""
    width = max(-(-length // BLOCK_SIZE) for _, length in spans)
    tables = torch.arange(len(spans) * width)
    if is_scattered:
        tables = torch.randperm(len(tables), generator=torch.Generator().manual_seed(0))
    tables = 1 + tables.view(len(spans), width)
    positions = [torch.arange(context - count, context) for count, context in spans]
    slots = [tables[i, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in enumerate(positions)]
    return KvRows(
        positions=torch.cat(positions).to(device),
        slot_mapping=torch.cat(slots).to(device),
        query_starts=torch.tensor([0, *(count for count, _ in spans)]).cumsum(0).to(device),
        context_lens=torch.tensor([context for _, context in spans]).to(device),
        block_tables=tables.to(device),
    )


def blocks_of(spans: Spans) -> int:
    """Number of blocks that `kv_rows` needs in a cache."""
    return 1 + len(spans) * max(-(-length // BLOCK_SIZE) for _, length in spans)


def rotations(shape: DecoderShape, positions: int, device: torch.device = _CPU) -> Tensor:
    """Cosines and sines of the rotary embedding with base 10,000: float32 [positions, 2, head_dim]."""
    exponents = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    angles = torch.outer(torch.arange(positions, device=device).float(), 10_000.0**-exponents)
    turns = torch.cat((angles, angles), 1)
    return torch.stack((turns.cos(), turns.sin()), 1)
