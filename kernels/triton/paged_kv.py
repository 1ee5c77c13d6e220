"""The KV cache as one step of the Triton kernels sees it."""

from __future__ import annotations

from torch import Tensor

from kernels.triton.attention import paged_attention
from kernels.triton.attention_launch import AttentionLaunches, AttentionSizes, choose_launches
from kernels.triton.paged_step import PagedStep
from kernels.triton.rope import HeadNorms, rope_write_kv


class TritonPagedKv:
    """Implements `kernels.ops.PagedKv`. Lives for one step; copies nothing to the host."""

    def __init__(
        self,
        step: PagedStep,
        *,
        deterministic: bool = False,
        tall_tiles: bool = False,
        launches: AttentionLaunches | None = None,
    ) -> None:
        """`deterministic`: a row's bits depend neither on the other rows of the step nor on how a prompt is chunked.

        `tall_tiles`: as in `TritonOps`. `launches` replace those that are chosen from shapes.
        """
        self._step = step
        self._deterministic = deterministic
        self._tall_tiles = tall_tiles
        self._launches = launches

    def rope_write_kv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rope_write_kv(q, k, v, self._step, layer)

    def rope_write_qkv(self, layer: int, qkv: Tensor, num_heads: int, norms: HeadNorms | None = None) -> Tensor:
        """`rope_write_kv` of merged rows [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim].

        With `norms`, each head of q and k is normed before it is rotated. Returns the rotated q, [num_tokens,
        num_heads, head_dim].
        """
        num_kv_heads = self._step.num_kv_heads
        heads = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, self._step.head_dim)
        first_v = num_heads + num_kv_heads
        q, k, v = heads[:, :num_heads], heads[:, num_heads:first_v], heads[:, first_v:]
        return rope_write_kv(q, k, v, self._step, layer, norms)

    def attention(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        launches = self._launches or self._choose_launches(q)
        return paged_attention(q, self._step, layer, window=window, launches=launches)

    def _choose_launches(self, q: Tensor) -> AttentionLaunches:
        sizes = AttentionSizes(
            num_sequences=self._step.rows.block_tables.shape[0],
            num_heads=q.shape[1],
            num_kv_heads=self._step.num_kv_heads,
            head_dim=q.shape[2],
            capacity_tokens=self._step.capacity_tokens,
            dtype=q.dtype,
        )
        return choose_launches(sizes, deterministic=self._deterministic, tall_tiles=self._tall_tiles)
