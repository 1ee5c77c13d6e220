"""The Triton kernels as ops, with the switch between deterministic products and faster ones of libraries."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import KvRows
from kernels.triton import activation, gather, gemm, norm
from kernels.triton.paged_kv import TritonPagedKv
from kernels.triton.paged_step import PagedStep


class TritonOps:
    """Implements `kernels.ops.Ops`.

    `deterministic`: an output row's bits depend on its own inputs alone. Otherwise cuBLAS multiplies, whose order of
    sums depends on the number of rows. `tall_tiles` and `gated_products`: the deterministic kernels take larger tiles
    for many rows, and compute the gated activation with its products, on a GPU where `kernels.triton.tile_check` has
    found the same bits.
    """

    def __init__(self, *, deterministic: bool, tall_tiles: bool = False, gated_products: bool = False) -> None:
        self.deterministic = deterministic
        self._tall_tiles = tall_tiles
        self._gated_products = gated_products

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        return gather.gather_rows(weight, token_ids)

    def linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """x @ weight.T + bias, in `out_dtype`; None: x's dtype."""
        if self.deterministic:
            return gemm.linear(x, weight, bias, out_dtype=out_dtype, tile=self._tile(x, weight))
        out = functional.linear(x, weight, bias)
        return out if out_dtype is None else out.to(out_dtype)

    def gated_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """silu(x @ gate.T) * (x @ up.T); `weight` and `bias` have the rows of gate, and then those of up."""
        if self.deterministic and self._gated_products:
            return gemm.gated_linear(x, weight, bias, tile=self._tile(x, weight))
        return activation.silu_mul_merged(self.linear(x, weight, bias))

    def _tile(self, x: Tensor, weight: Tensor) -> gemm.GemmTile | None:
        """None: that of the matrix."""
        return gemm.choose_tile_for_rows(len(x), len(weight), x.dtype) if self._tall_tiles else None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return norm.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return activation.silu_mul(gate, up)

    def paged_kv(
        self, rows: KvRows, kv_cache: Tensor, cos_sin: Tensor, scale: float, *, kv_scales: Tensor | None = None
    ) -> TritonPagedKv:
        step = PagedStep(rows=rows, kv_cache=kv_cache, cos_sin=cos_sin, scale=scale, kv_scales=kv_scales)
        return TritonPagedKv(step, deterministic=self.deterministic, tall_tiles=self._tall_tiles)
