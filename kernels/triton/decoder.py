"""The forward pass on a GPU: few launches per layer and no waits for the host, so a CUDA graph can contain it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.decoder import ALONE, DecoderShape, DecoderWeights, LayerListener, LayerWeights, Ranks
from kernels.ops import KvRows
from kernels.triton.gather import gather_rows
from kernels.triton.norm import MAX_WIDTH, add_rms_norm, rms_norm
from kernels.triton.ops import TritonOps
from kernels.triton.paged_kv import TritonPagedKv
from kernels.triton.rope import HeadNorms

#: The paged kernels keep a head in registers.
MAX_HEAD_DIM = 256


def unsupported(shape: DecoderShape) -> str | None:
    """Why the Triton kernels cannot run a decoder of that shape; None when they can."""
    if shape.hidden_size > MAX_WIDTH:
        return f"hidden_size {shape.hidden_size} is above {MAX_WIDTH}"
    if shape.head_dim > MAX_HEAD_DIM or shape.head_dim % 2:
        return f"head_dim {shape.head_dim} is odd or above {MAX_HEAD_DIM}"
    return None


def joined(*tensors: Tensor) -> Tensor:
    """Concatenates along the first dimension: a view if the tensors are adjacent in one storage, else a copy."""
    first, end = tensors[0], tensors[0].storage_offset()
    for tensor in tensors:
        assert tensor.shape[1:] == first.shape[1:]
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and tensor.dtype == first.dtype
        if not (same and tensor.is_contiguous() and tensor.storage_offset() == end):
            return torch.cat(tensors)
        end += tensor.numel()
    return first.as_strided((sum(tensor.shape[0] for tensor in tensors), *first.shape[1:]), first.stride())


def _joined_bias(*biases: Tensor | None) -> Tensor | None:
    """Models have all biases of a group, or none of them."""
    present = [bias for bias in biases if bias is not None]
    assert len(present) in (0, len(biases))
    return joined(*present) if present else None


def _head_norms(layer: LayerWeights, eps: float) -> HeadNorms | None:
    assert (layer.q_norm is None) == (layer.k_norm is None)
    if layer.q_norm is None or layer.k_norm is None:
        return None
    return HeadNorms(q=layer.q_norm, k=layer.k_norm, eps=eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """One layer's weights, with q, k and v merged into one matrix, and gate and up into another."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norms: HeadNorms | None
    output: Tensor
    output_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @staticmethod
    def of(layer: LayerWeights, eps: float) -> _Layer:
        return _Layer(
            input_norm=layer.input_norm,
            qkv=joined(layer.q, layer.k, layer.v),
            qkv_bias=_joined_bias(layer.q_bias, layer.k_bias, layer.v_bias),
            head_norms=_head_norms(layer, eps),
            output=layer.output,
            output_bias=layer.output_bias,
            post_attention_norm=layer.post_attention_norm,
            gate_up=joined(layer.gate, layer.up),
            gate_up_bias=_joined_bias(layer.gate_bias, layer.up_bias),
            down=layer.down,
            down_bias=layer.down_bias,
        )


class TritonDecoder:
    """Implements `kernels.decoder.DecoderKernel`.

    Rounds where `kernels.composed` does, on several ranks too, except for the logits, which are float32 sums in
    deterministic mode.
    """

    def __init__(
        self,
        ops: TritonOps,
        shape: DecoderShape,
        weights: DecoderWeights,
        cos_sin: Tensor,
        ranks: Ranks = ALONE,
        *,
        kv_scales: Tensor | None = None,
    ) -> None:
        """`cos_sin`: float32 [max_positions, 2, head_dim]; `kv_scales`: for an fp8 KV cache, as in `Ops.paged_kv`.

        Both are on the weights' device. Keeps no weights that it has copied.
        """
        self._ops = ops
        self._shape = shape
        self._embedding = weights.embedding
        self._layers = [_Layer.of(layer, shape.rms_norm_eps) for layer in weights.layers]
        self._norm = weights.norm
        self._lm_head = weights.lm_head
        self._cos_sin = cos_sin
        self._ranks = ranks
        self._kv_scales = kv_scales
        matrices = [matrix for layer in self._layers for matrix in (layer.qkv, layer.output, layer.gate_up, layer.down)]
        self.weight_bytes = sum(matrix.nbytes for matrix in (*matrices, self._lm_head))
        self.interrupt = None

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
        eps = self._shape.rms_norm_eps
        kv = self._ops.paged_kv(rows, kv_cache, self._cos_sin, self._shape.scale, kv_scales=self._kv_scales)
        hidden = gather_rows(self._embedding, token_ids)
        normed = rms_norm(hidden, self._layers[0].input_norm, eps)
        for index, layer in enumerate(self._layers):
            attended = self._attention(index, layer, normed, kv, on_layer)
            is_last = index + 1 == len(self._layers)
            if is_last:
                # From here on a row is needed only for its own logits.
                attended, hidden = gather_rows(attended, logits_rows), gather_rows(hidden, logits_rows)
            projected = self._ranks.all_reduce(self._ops.linear(attended, layer.output, layer.output_bias))
            normed, hidden = add_rms_norm(projected, hidden, layer.post_attention_norm, eps, in_place=True)
            gated = self._ops.gated_linear(normed, layer.gate_up, layer.gate_up_bias)
            next_norm = self._norm if is_last else self._layers[index + 1].input_norm
            down = self._ranks.all_reduce(self._ops.linear(gated, layer.down, layer.down_bias))
            normed, hidden = add_rms_norm(down, hidden, next_norm, eps, in_place=True)
        if hidden_only:
            return normed.float()
        logits = self._ops.linear(normed, self._lm_head, out_dtype=torch.float32)
        return self._ranks.gather_columns(logits, self._shape.vocab_size)

    def _attention(
        self, index: int, layer: _Layer, x: Tensor, kv: TritonPagedKv, on_layer: LayerListener | None
    ) -> Tensor:
        shape = self._shape
        qkv = self._ops.linear(x, layer.qkv, layer.qkv_bias)
        q = kv.rope_write_qkv(index, qkv, shape.num_heads, layer.head_norms)
        if on_layer is not None:
            on_layer(index + 1)
        return kv.attention(index, q, shape.windows[index])
