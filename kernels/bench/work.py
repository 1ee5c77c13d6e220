"""The minimum work of an op: what it must read, write and compute. Arithmetic over shapes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.decoder import DecoderShape

#: Sequences as (rows of this step, tokens in the context including them).
Spans = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Bytes that a call must move from or to memory, and operations that it must compute."""

    num_bytes: float
    flops: float

    def __add__(self, other: Work) -> Work:
        return Work(num_bytes=self.num_bytes + other.num_bytes, flops=self.flops + other.flops)

    def times(self, count: int) -> Work:
        """`count` times this work."""
        return Work(num_bytes=self.num_bytes * count, flops=self.flops * count)


def attention_work(shape: DecoderShape, spans: Spans, element_bytes: int) -> Work:
    """Causal attention of one layer without a window: K and V of all contexts once, two products per visible key."""
    contexts = sum(context for _, context in spans)
    # Row i of a chunk, from 0, sees the context before the chunk and i + 1 rows of it.
    seen = sum(rows * (context - rows) + rows * (rows + 1) // 2 for rows, context in spans)
    return Work(
        num_bytes=2.0 * contexts * shape.num_kv_heads * shape.head_dim * element_bytes,
        flops=4.0 * seen * shape.num_heads * shape.head_dim,
    )


def decoder_work(shape: DecoderShape, spans: Spans, element_bytes: int, weight_bytes: int) -> Work:
    """A forward pass with logits of each sequence's last row: all matrices once (`weight_bytes`), and all attention.

    After the attention of the last layer, only rows whose logits are wanted are computed.
    """
    num_layers, num_tokens = len(shape.windows), sum(rows for rows, _ in spans)
    width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    qkv = shape.hidden_size * (width + 2 * kv_width)
    others = shape.hidden_size * (width + 3 * shape.intermediate_size)
    head = shape.vocab_size * shape.hidden_size
    products = num_tokens * (num_layers * qkv + (num_layers - 1) * others) + len(spans) * (others + head)
    dense = Work(num_bytes=weight_bytes, flops=2.0 * products)
    return dense + attention_work(shape, spans, element_bytes).times(num_layers)
