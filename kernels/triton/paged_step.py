"""A step's view of the paged KV cache: as tensors on the host, and as the tuples that kernels take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.ops import KvRows


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedStep:
    """The rows of one step over a paged KV cache: what the kernels of all layers share."""

    rows: KvRows
    #: [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim], in the model's dtype or float8_e4m3fn.
    kv_cache: Tensor
    #: float32 [max_positions, 2, head_dim]: cosines and then sines of each position's angles.
    cos_sin: Tensor
    #: Softmax scale, above zero: applied to q @ k.T.
    scale: float
    #: Scales of an fp8 cache, float32 [num_layers, 2, num_kv_heads]: a number is stored as x / scale, saturated.
    kv_scales: Tensor | None = None

    @property
    def num_kv_heads(self) -> int:
        """KV heads of each layer."""
        return self.kv_cache.shape[3]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.kv_cache.shape[4]

    @property
    def head_dim(self) -> int:
        """Elements of a head."""
        return self.kv_cache.shape[5]

    @property
    def capacity_tokens(self) -> int:
        """Keys that a block table has space for."""
        return self.rows.block_tables.shape[1] * self.block_size

    def check(self, q: Tensor) -> None:
        """Asserts that the cache fits the queries, [num_tokens, num_heads, head_dim]."""
        _, num_heads, head_dim = q.shape
        assert self.kv_cache.shape[2] == 2
        assert self.kv_cache.stride(5) == q.stride(2) == 1
        assert head_dim == self.head_dim <= 256
        assert num_heads % self.num_kv_heads == 0
        if self.kv_scales is None:
            assert self.kv_cache.dtype == q.dtype
        else:
            assert self.kv_cache.dtype == torch.float8_e4m3fn
            assert self.kv_scales.dtype == torch.float32
            assert self.kv_scales.shape == self.kv_cache.shape[1:4]
            assert self.kv_scales.is_contiguous()


class CachePointers(NamedTuple):
    """The cache as a kernel takes it: addresses, and strides in elements."""

    ptr: Any
    #: Never read where there are no scales.
    scales_ptr: Any
    stride_block: Any
    stride_layer: Any
    #: From K to V.
    stride_kv: Any
    stride_head: Any
    stride_slot: Any

    @classmethod
    def of(cls, step: PagedStep) -> CachePointers:
        scales = step.cos_sin if step.kv_scales is None else step.kv_scales
        return cls(step.kv_cache, scales, *step.kv_cache.stride()[:5])


class HeadPointers(NamedTuple):
    """q, k or v, [num_tokens, heads, head_dim], as a kernel takes it: an address, and strides in elements."""

    ptr: Any
    stride_row: Any
    stride_head: Any

    @classmethod
    def of(cls, x: Tensor) -> HeadPointers:
        return cls(x, *x.stride()[:2])
