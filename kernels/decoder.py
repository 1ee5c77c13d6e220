"""The contract of a decoder: its shape, its weights, its ranks, and the forward pass that every backend implements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.ops import KvRows


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The dimensions of a decoder of the llama family.

    On several ranks, heads and intermediate size are those of one rank; hidden size and vocabulary are the model's.
    """

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    #: Sliding window of each layer: position p sees (p - window, p]; None: all positions up to p.
    windows: tuple[int | None, ...]

    @property
    def scale(self) -> float:
        """Softmax scale: applied to q @ k.T."""
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

    On several ranks, each has a shard: the matrices' rows of its own heads, of its slice of the intermediate size, and
    in `lm_head` of its slice of the vocabulary (`kernels.split.even_slice`). It has columns of `output` and `down`,
    whose biases only rank 0 has. Norms and the embedding are whole.
    """

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


class Ranks(Protocol):
    """The ranks that compute one model together, as one of them sees them.

    All ranks make the same calls, in the same order, with the same shapes.
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Adds all ranks' x [num_rows, features], contiguous, in place: the same bits on every rank.

        Adds in float32 in the order of ranks and rounds once, to x's dtype. A row's bits do not depend on other rows.
        """

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        """All ranks' columns, [num_rows, num_columns], on rank 0; the result on other ranks is undefined.

        x: [num_rows, columns of `kernels.split.even_slice(num_columns, rank, size)`].
        """


class LoneRank:
    """Implements `Ranks` for a single rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor, num_columns: int) -> Tensor:
        assert x.shape[1] == num_columns
        return x


ALONE = LoneRank()


#: Called during a forward pass with the number of layers, from the first on, whose K and V have been written. On a GPU:
#: will have been written when the device has finished the work launched so far.
LayerListener = Callable[[int], None]


class PassInterrupted(Exception):
    """A forward pass has ended between two layers: the K and V of its rows are undefined, and there are no logits."""


class Interrupt:
    """Ends forward passes between two layers while it is set. Any thread may set it, also during a pass."""

    def __init__(self) -> None:
        # Memory of its own: C++ code reads it during a pass.
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._numpy = self._flag.numpy()

    @property
    def address(self) -> int:
        """Address of an int32 that is 1 while it is set, else 0."""
        return self._flag.data_ptr()

    @property
    def is_set(self) -> bool:
        """Whether passes end."""
        return bool(self._numpy[0])

    def set(self) -> None:
        """Ends the pass that runs, and every later one, except for those of few rows where a backend says so."""
        self._numpy[0] = 1

    def clear(self) -> None:
        """Lets later passes run to their end."""
        self._numpy[0] = 0

    def check(self) -> None:
        """Raises `PassInterrupted` while it is set."""
        if self.is_set:
            raise PassInterrupted


class DecoderKernel(Protocol):
    """The forward pass, bound to weights."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the matrices in memory, which a step reads at least once."""

    @property
    def interrupt(self) -> Interrupt | None:
        """Ends passes of more than a few rows; None: the backend runs every pass to its end.

        None where the host only launches work, and on several ranks, which all have to end in the same layer.
        """

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
        """Writes K and V of all rows to their slots; returns float32 logits [num_logits, vocab_size].

        With `hidden_only`, hidden states after the final norm instead: float32 [num_logits, hidden_size].
        token_ids: int64 [num_tokens]; logits_rows: int64 [num_logits]; kv_cache: [num_blocks, num_layers, 2,
        num_kv_heads, block_size, head_dim], contiguous, of the weights' dtype, or float8_e4m3fn when the decoder was
        made with `kv_scales`. The next call may overwrite the memory of the logits. `on_layer` is called after each
        layer, or never if the backend computes a pass in one call. Raises `PassInterrupted`.

        All ranks call it with the same arguments, except for the cache, which has the rank's own heads. Rank 0 returns
        the logits; the result on other ranks is undefined.
        """
