"""The one signature of every op. `kernels.reference` is the truth; faster backends must match it.

All ops are row-wise: an output row depends only on its own inputs, its position and the KV of its own sequence, never
on which other rows are in the batch. Ops allocate their results; only `rope_write_kv` changes an input, the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRows:
    """The rows of one step: their positions in their sequences and their slots in the KV cache (int64 tensors).

    Rows `[query_starts[i], query_starts[i + 1])` belong to sequence `i`, at consecutive positions that end at
    `context_lens[i] - 1`.
    """

    #: [num_tokens] absolute position of each row.
    positions: Tensor
    #: [num_tokens] slot (block_id * block_size + offset) the row's K and V are written to.
    slot_mapping: Tensor
    #: [num_sequences + 1], from 0 to num_tokens.
    query_starts: Tensor
    #: [num_sequences] tokens in the context, including this step's rows.
    context_lens: Tensor
    #: [num_sequences, max_blocks]; blocks of entries beyond a sequence's context are never read.
    block_tables: Tensor


class PagedKv(Protocol):
    """The KV cache as one step sees it: what all layers share (indices, masks, cos and sin) is prepared once."""

    def rope_write_kv(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes the rotated K, and V, to the rows' slots of `layer`; returns the rotated q.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]. A row that opens a block
        (offset 0) clears the rest of it, so that whole blocks can be read without leftovers of an earlier owner.
        """

    def attention(self, layer: int, q: Tensor, window: int | None) -> Tensor:
        """Causal attention of the rows over their own context, K and V read back as stored.

        q: rotated, [num_tokens, num_heads, head_dim]; with `window`, position p sees (p - window, p]. Returns
        [num_tokens, num_heads * head_dim].
        """


class Ops(Protocol):
    """The ops that a decoder needs. `x` and other activations are [num_rows, features] in the model's dtype."""

    def embedding(self, token_ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of weight [vocab, hidden]: [num_tokens, hidden]."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias; weight: [out_features, in_features]."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Over the last dimension; computed in float32, rounded to x's dtype before the weight is applied."""

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""

    def paged_kv(
        self, rows: KvRows, kv_cache: Tensor, cos_sin: Tensor, scale: float, *, kv_scales: Tensor | None = None
    ) -> PagedKv:
        """Prepares one step over `kv_cache`.

        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous, of the model's dtype, or
        float8_e4m3fn with kv_scales: float32 [num_layers, 2, num_kv_heads], positive. A number is then stored as
        x / scale, rounded once from float32 and saturated to +-448, and read back as stored * scale. cos_sin: float32
        [max_positions, 2, head_dim], cosines and then sines of each position's angles; scale: applied to q @ k.T.
        """
