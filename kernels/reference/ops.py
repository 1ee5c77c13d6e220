"""The ops in plain torch, rounding where transformers rounds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kernels.ops import KvRows
from kernels.reference.paged_kv import ReferencePagedKv


class ReferenceOps:
    """Implements `kernels.ops.Ops`; stateless."""

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        return weight.index_select(0, token_ids)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
        return normed.to(x.dtype).mul_(weight)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate).mul_(up)

    def paged_kv(
        self, rows: KvRows, kv_cache: Tensor, cos_sin: Tensor, scale: float, *, kv_scales: Tensor | None = None
    ) -> ReferencePagedKv:
        return ReferencePagedKv(rows, kv_cache, cos_sin, scale, kv_scales=kv_scales)
