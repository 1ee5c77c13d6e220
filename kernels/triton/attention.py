"""Causal attention of a step's rows over a paged KV cache: chooses the kernels and launches them."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from kernels.triton.attention_kernels import combine_kernel, decode_kernel, prefill_kernel
from kernels.triton.attention_launch import AttentionLaunch, AttentionLaunches
from kernels.triton.attention_softmax import AttentionShape
from kernels.triton.paged_step import CachePointers, HeadPointers, PagedStep


def paged_attention(
    q: Tensor, step: PagedStep, layer: int, *, window: int | None, launches: AttentionLaunches
) -> Tensor:
    """Attention of the rows over their contexts in `layer`, where their own K and V have been written.

    q: [num_tokens, num_heads, head_dim], last dimension contiguous. With `window`, position p sees (p - window, p].
    Every sequence has a row. Returns [num_tokens, num_heads * head_dim] of q's dtype; zeros for a single row with an
    empty context.
    """
    _check(q, step)
    assert window is None or window > 0
    num_tokens, num_heads, head_dim = q.shape
    num_sequences = step.rows.context_lens.shape[0]
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    call = _Call(q, step, layer, window)
    # Shapes suffice: with as many rows as sequences each has one row, and a single sequence has all rows.
    if num_tokens == num_sequences > 0 or 1 < num_sequences < num_tokens:
        _decode(call, launches.decode, out)
    if num_tokens > num_sequences:
        _prefill(call, launches.prefill, out)
    return out


class _Call:
    """The arguments that the kernels have in common."""

    def __init__(self, q: Tensor, step: PagedStep, layer: int, window: int | None) -> None:
        rows = step.rows
        self.num_tokens, self.num_heads, self.head_dim = q.shape
        self.num_kv_heads, self.block_size = step.num_kv_heads, step.block_size
        self.num_sequences = rows.context_lens.shape[0]
        self.capacity_tokens = step.capacity_tokens
        self.has_scales = step.kv_scales is not None
        self.q = HeadPointers.of(q)
        self.cache = CachePointers.of(step)
        self.sequences = (rows.query_starts, rows.context_lens)
        self.tables = (rows.block_tables, rows.block_tables.stride(0))
        self.layer = layer
        # Kernels work with powers of two.
        self.scale = step.scale * math.log2(math.e)
        self.window = window
        self.window_argument = window or 0

    def shape(self, launch: AttentionLaunch) -> AttentionShape:
        """The kernels' compile-time numbers."""
        group_size = self.num_heads // self.num_kv_heads
        assert launch.block_m >= group_size
        assert launch.split_tokens % launch.block_n == 0
        return AttentionShape(
            num_kv_heads=self.num_kv_heads,
            group_size=group_size,
            head_dim=self.head_dim,
            head_dim_padded=max(16, triton.next_power_of_2(self.head_dim)),
            block_size=self.block_size,
            block_m=launch.block_m,
            block_n=launch.block_n,
            has_window=self.window is not None,
            has_scales=self.has_scales,
        )


def _decode(call: _Call, launch: AttentionLaunch, out: Tensor) -> None:
    shape = call.shape(launch)
    num_splits = launch.num_splits(call.capacity_tokens, call.window)
    # Without splits there are no partial results, and the kernel ignores these two.
    partial = stats = out
    if num_splits > 1:
        splits = (call.num_sequences, call.num_heads, num_splits)
        partial = torch.empty((*splits, call.head_dim), dtype=torch.float32, device=out.device)
        stats = torch.empty((*splits, 2), dtype=torch.float32, device=out.device)
    decode_kernel[(call.num_sequences, call.num_kv_heads, num_splits)](
        out,
        partial,
        stats,
        call.q,
        call.cache,
        *call.sequences,
        *call.tables,
        call.layer,
        call.scale,
        call.window_argument,
        num_splits,
        launch.split_tokens,
        SHAPE=shape,
        EVEN_SPLITS=launch.even_splits,
        IS_SPLIT=num_splits > 1,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=False,
    )
    if num_splits > 1:
        _combine(call, launch, out, partial, stats)


def _combine(call: _Call, launch: AttentionLaunch, out: Tensor, partial: Tensor, stats: Tensor) -> None:
    combine_kernel[(call.num_sequences, call.num_heads)](
        out,
        partial,
        stats,
        call.cache,
        *call.sequences,
        call.layer,
        call.window_argument,
        stats.shape[2],
        launch.split_tokens,
        SHAPE=call.shape(launch),
        EVEN_SPLITS=launch.even_splits,
        num_warps=1,
        enable_fp_fusion=False,
    )


def _prefill(call: _Call, launch: AttentionLaunch, out: Tensor) -> None:
    shape = call.shape(launch)
    assert not launch.even_splits or launch.split_tokens == 0
    tile_rows = shape.block_m // shape.group_size
    prefill_kernel[(call.num_tokens // tile_rows + call.num_sequences, call.num_kv_heads)](
        out,
        call.q,
        call.cache,
        *call.sequences,
        *call.tables,
        call.layer,
        call.scale,
        call.window_argument,
        call.num_sequences,
        launch.split_tokens,
        SHAPE=shape,
        IS_SPLIT=launch.split_tokens > 0,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=False,
    )


def _check(q: Tensor, step: PagedStep) -> None:
    step.check(q)
    assert step.scale > 0
    assert step.block_size <= 64
    rows = step.rows
    num_sequences = rows.context_lens.shape[0]
    assert num_sequences <= q.shape[0]
    assert rows.query_starts.shape == (num_sequences + 1,)
    assert rows.block_tables.shape[0] == num_sequences
    assert all(x.dtype == torch.int64 for x in (rows.query_starts, rows.context_lens, rows.block_tables))
    assert rows.query_starts.is_contiguous()
    assert rows.context_lens.is_contiguous()
    assert rows.block_tables.stride(1) == 1 or rows.block_tables.shape[1] < 2
