"""The forward pass composed of single ops: for the reference and any other backend that implements them."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.decoder import ALONE, DecoderShape, DecoderWeights, Interrupt, LayerListener, LayerWeights, Ranks
from kernels.ops import KvRows, Ops, PagedKv


class ComposedDecoder:
    """Implements `kernels.decoder.DecoderKernel`.

    On several ranks, the output and down products are sums over the ranks' shards. Each rank's partial sum is rounded
    to the dtype, as every product is; rank 0's includes the bias. Then the partial sums are added in float32, and the
    total is rounded once more. The residual is added last.
    """

    def __init__(
        self,
        ops: Ops,
        shape: DecoderShape,
        weights: DecoderWeights,
        cos_sin: Tensor,
        ranks: Ranks = ALONE,
        *,
        kv_scales: Tensor | None = None,
    ) -> None:
        """`cos_sin`: float32 [max_positions, 2, head_dim]; `kv_scales`: for an fp8 KV cache, as in `Ops.paged_kv`.

        Both are on the weights' device.
        """
        self._ops = ops
        self._shape = shape
        self._weights = weights
        matrices = [m for w in weights.layers for m in (w.q, w.k, w.v, w.output, w.gate, w.up, w.down)]
        self.weight_bytes = sum(matrix.nbytes for matrix in (*matrices, weights.lm_head))
        self._cos_sin = cos_sin
        self._ranks = ranks
        self._kv_scales = kv_scales
        self.interrupt = Interrupt() if ranks.size == 1 else None

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        rows: KvRows,
        logits_rows: Tensor,
        kv_cache: Tensor,
        on_layer: LayerListener | None = None,
        *,
        hidden_only: bool = False,
    ) -> Tensor:
        ops, layers, eps = self._ops, self._weights.layers, self._shape.rms_norm_eps
        kv = ops.paged_kv(rows, kv_cache, self._cos_sin, self._shape.scale, kv_scales=self._kv_scales)
        hidden = ops.embedding(token_ids, self._weights.embedding)
        normed = ops.rms_norm(hidden, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            if self.interrupt is not None:
                self.interrupt.check()
            attended = self._ranks.all_reduce(self._attention(index, layer, normed, kv, on_layer))
            normed, hidden = ops.add_rms_norm(attended, hidden, layer.post_attention_norm, eps)
            next_norm = layers[index + 1].input_norm if index + 1 < len(layers) else self._weights.norm
            down = self._ranks.all_reduce(self._mlp(layer, normed))
            normed, hidden = ops.add_rms_norm(down, hidden, next_norm, eps)
        wanted = normed.index_select(0, logits_rows)
        if hidden_only:
            return wanted.float()
        logits = ops.linear(wanted, self._weights.lm_head)
        return self._ranks.gather_columns(logits, self._shape.vocab_size).float()

    def _attention(
        self, index: int, layer: LayerWeights, x: Tensor, kv: PagedKv, on_layer: LayerListener | None
    ) -> Tensor:
        ops, shape = self._ops, self._shape
        q = ops.linear(x, layer.q, layer.q_bias).view(-1, shape.num_heads, shape.head_dim)
        k = ops.linear(x, layer.k, layer.k_bias).view(-1, shape.num_kv_heads, shape.head_dim)
        v = ops.linear(x, layer.v, layer.v_bias).view(-1, shape.num_kv_heads, shape.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, shape.rms_norm_eps)
            k = ops.rms_norm(k, layer.k_norm, shape.rms_norm_eps)
        q = kv.rope_write_kv(index, q, k, v)
        if on_layer is not None:
            on_layer(index + 1)
        return ops.linear(kv.attention(index, q, shape.windows[index]), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        ops = self._ops
        gated = ops.silu_mul(ops.linear(x, layer.gate, layer.gate_bias), ops.linear(x, layer.up, layer.up_bias))
        return ops.linear(gated, layer.down, layer.down_bias)
