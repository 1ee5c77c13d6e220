"""The one decoder of the llama family; llama, mistral, qwen2 and qwen3 differ in config and weights only."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.ops import Ops, PagedKv
from pdserve.model.batch import Batch
from pdserve.model.config import ModelConfig
from pdserve.model.rope import make_cos_sin
from pdserve.model.weights import LayerWeights, Weights


class Decoder:
    """Token ids in, logits out; K and V of the batch's rows are written to the cache on the way."""

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, *, max_model_len: int | None = None) -> None:
        self.config = config
        #: Positions that can be served; the table of angles ends here.
        self.max_model_len = max_model_len or config.max_position_embeddings
        self._weights = weights
        self._ops = ops
        self._scale = config.head_dim**-0.5
        self._cos_sin = make_cos_sin(
            config.rope,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
            max_model_len=self.max_model_len,
        ).to(weights.norm.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and the KV cache."""
        return self._weights.norm.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are; batches and the cache must be there too."""
        return self._weights.norm.device

    @torch.inference_mode()
    def forward(self, batch: Batch, kv_cache: Tensor) -> Tensor:
        """Float32 logits [num_logits, vocab_size] of the batch's `logits_rows`.

        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim] of the model's dtype, contiguous.
        """
        ops, layers, eps = self._ops, self._weights.layers, self.config.rms_norm_eps
        kv = ops.paged_kv(batch.kv_rows(), kv_cache, self._cos_sin, self._scale)
        hidden = ops.embedding(batch.token_ids, self._weights.embedding)
        normed = ops.rms_norm(hidden, layers[0].input_norm, eps)
        for index, layer in enumerate(layers):
            attended = self._attention(index, layer, normed, kv)
            normed, hidden = ops.add_rms_norm(attended, hidden, layer.post_attention_norm, eps)
            next_norm = layers[index + 1].input_norm if index + 1 < len(layers) else self._weights.norm
            normed, hidden = ops.add_rms_norm(self._mlp(layer, normed), hidden, next_norm, eps)
        return ops.linear(normed.index_select(0, batch.logits_rows), self._weights.lm_head).float()

    def _attention(self, index: int, layer: LayerWeights, x: Tensor, kv: PagedKv) -> Tensor:
        ops, config = self._ops, self.config
        q = ops.linear(x, layer.q, layer.q_bias).view(-1, config.num_heads, config.head_dim)
        k = ops.linear(x, layer.k, layer.k_bias).view(-1, config.num_kv_heads, config.head_dim)
        v = ops.linear(x, layer.v, layer.v_bias).view(-1, config.num_kv_heads, config.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = ops.rms_norm(q, layer.q_norm, config.rms_norm_eps)
            k = ops.rms_norm(k, layer.k_norm, config.rms_norm_eps)
        q = kv.rope_write_kv(index, q, k, v)
        return ops.linear(kv.attention(index, q, config.layer_windows[index]), layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        ops = self._ops
        gated = ops.silu_mul(ops.linear(x, layer.gate, layer.gate_bias), ops.linear(x, layer.up, layer.up_bias))
        return ops.linear(gated, layer.down, layer.down_bias)
