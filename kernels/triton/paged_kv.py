"""The KV cache as one step of the Triton kernels sees it."""

from __future__ import annotations

from torch import Tensor

from kernels.ops import KvRows
from kernels.triton.attention import paged_attention
from kernels.triton.attention_launch import AttentionLaunches, choose_launches
from kernels.triton.rope import rope_write_kv


class TritonPagedKv:
    """Implements `kernels.ops.PagedKv`. Lives for one step; nothing of it is copied to the host."""

    def __init__(
        self,
        rows: KvRows,
        kv_cache: Tensor,
        cos_sin: Tensor,
        scale: float,
        *,
        deterministic: bool = False,
        kv_scales: Tensor | None = None,
        launches: AttentionLaunches | None = None,
    ) -> None:
        """`deterministic`: a row's bits do not depend on what it shares the step with, nor on how a prompt is cut.

        kv_cache: of the model's dtype, or float8_e4m3fn with kv_scales, float32 [num_layers, 2 (K, V), num_kv_heads]:
        what a stored number is multiplied by. `launches` replace those that are chosen from shapes.
        """
        self._rows = rows
        self._kv_cache = kv_cache
        self._cos_sin = cos_sin
        self._scale = scale
        self._deterministic = deterministic
        self._kv_scales = kv_scales
        self._launches = launches

    def rope_write_kv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._rope_write_kv(layer, q, k, v, None, 0.0)

    def rope_write_qkv(
        self,
        layer: int,
        qkv: Tensor,
        num_heads: int,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> Tensor:
        """`rope_write_kv` of merged rows [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].

        With q_norm and k_norm [head_dim], each head of q and k is RMS-normed before it is rotated, rounded as
        `kernels.ops.Ops.rms_norm` rounds. Returns the rotated q, [num_tokens, num_heads, head_dim].
        """
        num_kv_heads, head_dim = self._kv_cache.shape[3], self._kv_cache.shape[5]
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, head_dim)
        first_v = num_heads + num_kv_heads
        q, k, v = heads[:, :num_heads], heads[:, num_heads:first_v], heads[:, first_v:]
        assert (q_norm is None) == (k_norm is None)
        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        return self._rope_write_kv(layer, q, k, v, norms, eps)

    def attention(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        return paged_attention(
            q,
            self._rows,
            self._kv_cache,
            layer,
            scale=self._scale,
            window=window,
            launches=self._launches or self._choose_launches(q),
            kv_scales=self._kv_scales,
        )

    def _choose_launches(self, q: Tensor) -> AttentionLaunches:
        tables, cache = self._rows.block_tables, self._kv_cache
        return choose_launches(
            num_sequences=tables.shape[0],
            num_heads=q.shape[1],
            num_kv_heads=cache.shape[3],
            head_dim=q.shape[2],
            capacity_tokens=tables.shape[1] * cache.shape[4],
            dtype=q.dtype,
            deterministic=self._deterministic,
        )

    def _rope_write_kv(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        return rope_write_kv(
            q,
            k,
            v,
            positions=self._rows.positions,
            slot_mapping=self._rows.slot_mapping,
            cos_sin=self._cos_sin,
            kv_cache=self._kv_cache,
            layer=layer,
            norms=norms,
            eps=eps,
            kv_scales=self._kv_scales,
        )
