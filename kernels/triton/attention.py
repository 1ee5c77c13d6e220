"""Causal attention of a step's rows over a paged KV cache: which kernels run, on which grids."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from kernels.ops import KvRows
from kernels.triton.attention_kernels import combine_kernel, decode_kernel, prefill_kernel
from kernels.triton.attention_launch import AttentionLaunch, AttentionLaunches


def paged_attention(
    q: Tensor,
    rows: KvRows,
    kv_cache: Tensor,
    layer: int,
    *,
    scale: float,
    window: int | None,
    launches: AttentionLaunches,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """Attention of the rows over their contexts in `layer`, their own K and V already written there.

    q: [num_tokens, num_heads, head_dim], last dimension contiguous. kv_cache: [num_blocks, num_layers, 2, num_kv_heads,
    block_size, head_dim] of q's dtype, or float8_e4m3fn with `kv_scales`, float32 [num_layers, 2, num_kv_heads].
    `scale` (above zero) is applied to q @ k.T; with `window`, position p sees (p - window, p]. Every sequence has a
    row. Returns [num_tokens, num_heads * head_dim] of q's dtype; zeros for a single row with an empty context.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_sequences = rows.context_lens.shape[0]
    _check(q, rows, kv_cache, kv_scales)
    assert scale > 0
    assert window is None or window > 0
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    call = _Call(
        q=q,
        rows=rows,
        kv_cache=kv_cache,
        layer=layer,
        # Kernels work with powers of two.
        scale=scale * math.log2(math.e),
        window=window,
        kv_scales=kv_scales,
    )
    # Shapes alone tell: with as many rows as sequences each has one, and a sequence by itself has all rows.
    if num_tokens == num_sequences > 0 or 1 < num_sequences < num_tokens:
        _decode(call, launches.decode, out)
    if num_tokens > num_sequences:
        _prefill(call, launches.prefill, out)
    return out


class _Call:
    """What the kernels are given alike."""

    def __init__(
        self,
        *,
        q: Tensor,
        rows: KvRows,
        kv_cache: Tensor,
        layer: int,
        scale: float,
        window: int | None,
        kv_scales: Tensor | None,
    ) -> None:
        self.num_tokens, self.num_heads, self.head_dim = q.shape
        self.num_sequences, max_blocks = rows.block_tables.shape
        self.num_kv_heads, block_size = kv_cache.shape[3:5]
        self.capacity_tokens = max_blocks * block_size
        self.layer = layer
        self.window = window
        self.window_argument = window or 0
        # Never read when there are none.
        self.scales = q if kv_scales is None else kv_scales
        self.sequences = (rows.query_starts, rows.context_lens)
        self.inputs = (q, kv_cache, self.scales, *self.sequences, rows.block_tables, layer, scale, self.window_argument)
        self.strides = (*q.stride()[:2], rows.block_tables.stride(0), *kv_cache.stride()[:5])
        self.shape: dict[str, Any] = {
            "NUM_KV_HEADS": self.num_kv_heads,
            "SHARE": self.num_heads // self.num_kv_heads,
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_PADDED": max(16, triton.next_power_of_2(self.head_dim)),
            "HAS_WINDOW": window is not None,
            "HAS_SCALES": kv_scales is not None,
        }
        self.block_size = block_size


def _decode(call: _Call, launch: AttentionLaunch, out: Tensor) -> None:
    num_splits = launch.num_splits(call.capacity_tokens, call.window)
    assert launch.split_tokens % launch.block_n == 0
    assert launch.block_m >= call.shape["SHARE"]
    # Without splits there is nothing in between, and the kernel is given something it leaves alone.
    partial = stats = out
    if num_splits > 1:
        places = (call.num_sequences, call.num_heads, num_splits)
        partial = torch.empty((*places, call.head_dim), dtype=torch.float32, device=out.device)
        stats = torch.empty((*places, 2), dtype=torch.float32, device=out.device)
    decode_kernel[(call.num_sequences, call.num_kv_heads, num_splits)](
        out,
        partial,
        stats,
        *call.inputs,
        num_splits,
        launch.split_tokens,
        *call.strides,
        **call.shape,
        BLOCK_SIZE=call.block_size,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        EVEN_SPLITS=launch.even_splits,
        IS_SPLIT=num_splits > 1,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=False,
    )
    if num_splits > 1:
        combine_kernel[(call.num_sequences, call.num_heads)](
            out,
            partial,
            stats,
            call.scales,
            *call.sequences,
            call.layer,
            call.window_argument,
            num_splits,
            launch.split_tokens,
            **call.shape,
            BLOCK_N=launch.block_n,
            EVEN_SPLITS=launch.even_splits,
            num_warps=1,
            enable_fp_fusion=False,
        )


def _prefill(call: _Call, launch: AttentionLaunch, out: Tensor) -> None:
    assert launch.block_m >= call.shape["SHARE"]
    assert launch.split_tokens % launch.block_n == 0
    assert not launch.even_splits or launch.split_tokens == 0
    tile_rows = launch.block_m // call.shape["SHARE"]
    prefill_kernel[(call.num_tokens // tile_rows + call.num_sequences, call.num_kv_heads)](
        out,
        *call.inputs,
        call.num_sequences,
        launch.split_tokens,
        *call.strides,
        **call.shape,
        BLOCK_SIZE=call.block_size,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        IS_SPLIT=launch.split_tokens > 0,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        enable_fp_fusion=False,
    )


def _check(q: Tensor, rows: KvRows, kv_cache: Tensor, kv_scales: Tensor | None) -> None:
    num_tokens, num_heads, head_dim = q.shape
    _, num_layers, two, num_kv_heads, block_size, cached_dim = kv_cache.shape
    num_sequences = rows.context_lens.shape[0]
    assert two == 2
    assert head_dim == cached_dim <= 256
    assert num_heads % num_kv_heads == 0
    assert block_size <= 64
    assert num_sequences <= num_tokens
    assert q.stride(2) == kv_cache.stride(5) == 1
    assert rows.query_starts.shape == (num_sequences + 1,)
    assert rows.block_tables.shape[0] == num_sequences
    assert all(x.dtype == torch.int64 for x in (rows.query_starts, rows.context_lens, rows.block_tables))
    assert rows.query_starts.is_contiguous()
    assert rows.context_lens.is_contiguous()
    assert rows.block_tables.stride(1) == 1 or rows.block_tables.shape[1] < 2
    if kv_scales is None:
        assert kv_cache.dtype == q.dtype
    else:
        assert kv_cache.dtype == torch.float8_e4m3fn
        assert kv_scales.dtype == torch.float32
        assert kv_scales.shape == (num_layers, 2, num_kv_heads)
        assert kv_scales.is_contiguous()
