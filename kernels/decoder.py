"""What a decoder computes with: its shape, its weights, its ranks, and the forward pass that every sibling offers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.ops import KvRows


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The numbers of a decoder of the llama family.

    One of several ranks has heads and an intermediate size of its own; hidden size and vocabulary are the model's.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    #: Per layer: position p sees (p - window, p]; None: everything before it.
    windows: tuple[int | None, ...]

    @property
    def scale(self) -> float:
        """Applied to q @ k.T."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer; matrices are [out_features, in_features]."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    v_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_attention_norm: Tensor
    gate: Tensor
    gate_bias: Tensor | None
    up: Tensor
    up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """A whole decoder, all of one dtype on one device; `lm_head` is `embedding` when they are tied.

    One of several ranks has the matrices' rows of its own heads, of its part of the intermediate size, and of its part
    of the vocabulary (`kernels.split.even_slice`) in `lm_head`; of `output` and `down` it has columns, and rank 0 alone
    has their biases. Norms and the embedding are whole.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


class Ranks(Protocol):
    """Those who compute one model together, seen by one of them. All make the same calls with the same shapes."""

    @property
    def rank(self) -> int:
        """This one: from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds up all ranks' x [num_rows, features], contiguous, in place: the same bits on every rank.

        The parts are added in float32 by rank, and the sum is rounded once, to x's dtype: a row's bits do not depend on
        other rows.
        """

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """All ranks' parts side by side, [num_rows, num_columns], on rank 0; what others get has no meaning.

        x: [num_rows, columns of `kernels.split.even_slice(num_columns, rank, size)`].
        """


class LoneRank:
    """Implements `Ranks` for one: there is nobody to talk to."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        assert x.shape[1] == num_columns
        return x


ALONE = LoneRank()


#: Told during a forward pass: K and V of so many layers, from the first on, are written, or will be when the device has
#: done what was launched so far.
LayerListener = Callable[[int], None]


class DecoderKernel(Protocol):
    """The forward pass, bound to weights."""

    @property
    def weight_bytes(self) -> int:
        """Of the matrices, which a step reads at least once, as they lie in memory."""

    def forward(
        self,
        token_ids: Tensor,
        rows: KvRows,
        logits_rows: Tensor,
        kv_cache: Tensor,
        on_layer: LayerListener | None = None,
    ) -> Tensor:
        """Writes K and V of all rows to their slots; float32 logits [num_logits, vocab_size] of the wanted rows.

        token_ids: int64 [num_tokens]; logits_rows: int64 [num_logits]; kv_cache: [num_blocks, num_layers, 2,
        num_kv_heads, block_size, head_dim], contiguous, of the weights' dtype, or float8_e4m3fn when the decoder was
        made with `kv_scales`. The logits may lie in memory that the next call overwrites. `on_layer` is told after each
        layer, or never where a pass is computed in one call.

        Of several ranks all call it with the same arguments, but for the cache, which has the rank's own heads. Rank 0
        has the logits; what others return has no meaning.
        """
