"""Batches on a device: one copy per step of what `BatchBuilder` made, into memory with a fixed address.

A batch may be padded, so that few shapes occur. Each padding row belongs to a sequence of its own with an empty
context, and writes no KV (slot -1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdserve.model.batch import Batch

#: Fields start at multiples of this many elements, which is 16 bytes.
_ALIGNED_ELEMENTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Sizes of a batch's tensors."""

    num_tokens: int
    num_sequences: int
    num_blocks: int
    num_logits: int

    @classmethod
    def of(cls, batch: Batch) -> BatchShape:
        """The shape of a batch, without padding."""
        return cls(
            num_tokens=len(batch.token_ids),
            num_sequences=len(batch.context_lens),
            num_blocks=batch.block_tables.shape[1],
            num_logits=len(batch.logits_rows),
        )

    @property
    def num_elements(self) -> int:
        """Size of the memory that holds all fields, in int64 elements."""
        return sum(-(-size // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS for _, size in self._sizes())

    @property
    def is_decode_only(self) -> bool:
        """Whether each sequence has one row, whose logits are requested."""
        return self.num_tokens == self.num_sequences == self.num_logits

    def has_space_for(self, other: BatchShape) -> bool:
        """Whether a decode step of the other shape can be padded to this one."""
        return self.num_sequences >= other.num_sequences and self.num_blocks >= other.num_blocks

    def views(self, memory: Tensor) -> Batch:
        """A batch whose fields follow each other in `memory`, int64 [num_elements] or more."""
        fields, first = {}, 0
        for name, size in self._sizes():
            fields[name] = memory[first : first + size]
            first += -(-size // _ALIGNED_ELEMENTS) * _ALIGNED_ELEMENTS
        fields["block_tables"] = fields["block_tables"].view(self.num_sequences, self.num_blocks)
        return Batch(**fields, hidden_only=False)

    def _sizes(self) -> Iterator[tuple[str, int]]:
        yield "token_ids", self.num_tokens
        yield "positions", self.num_tokens
        yield "slot_mapping", self.num_tokens
        yield "query_starts", self.num_sequences + 1
        yield "context_lens", self.num_sequences
        yield "logits_rows", self.num_logits
        # The last one: its size does not change where the others are.
        yield "block_tables", self.num_sequences * self.num_blocks


def empty_batch() -> Batch:
    """A batch without sequences, to be padded."""
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(
        token_ids=none,
        positions=none,
        slot_mapping=none,
        query_starts=torch.zeros(1, dtype=torch.int64),
        context_lens=none,
        block_tables=none.view(0, 0),
        logits_rows=none,
    )


def current(device: torch.device) -> AbstractContextManager[object]:
    """A context in which this thread's launches go to `device`. Not to be nested."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class DeviceBatches:
    """Memory for batches on a device, and a pinned copy of it on the host."""

    def __init__(self, device: torch.device, num_elements: int = 0) -> None:
        """Allocates `num_elements`, which never change their address; 0: grows, for a batch that does not fit."""
        self._device = device
        self._may_grow = num_elements == 0
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._reserve(num_elements)

    def upload(self, batch: Batch, shape: BatchShape | None = None, token_ids: Tensor | None = None) -> Batch:
        """The batch on the device, padded to `shape`; valid until the next call. Does not wait for the copy.

        `token_ids`, int64 [num_tokens] on the device, replace those of the batch; -1, a failed sample, becomes 0. A
        step that reads the previous batch may still be running, because copies and steps share one stream.
        """
        shape = shape or BatchShape.of(batch)
        size = shape.num_elements
        if size > len(self._host):
            assert self._may_grow, "graphs contain the address of this memory"
            self._reserve(2 * size)
        if self._copied is not None:
            # The previous copy is done, or about to be: only the step that it was made for can still be in flight.
            self._copied.synchronize()
        _fill(shape.views(self._host), batch)
        self._on_device[:size].copy_(self._host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        uploaded = replace(shape.views(self._on_device), hidden_only=batch.hidden_only)
        if token_ids is not None:
            torch.clamp(token_ids, min=0, out=uploaded.token_ids[: len(token_ids)])
        return uploaded

    def _reserve(self, num_elements: int) -> None:
        self._host = torch.zeros(num_elements, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._on_device = torch.zeros(num_elements, dtype=torch.int64, device=self._device)


def _fill(padded: Batch, batch: Batch) -> None:
    """Copies `batch`, and fills in padding rows."""
    tokens, sequences, logits = len(batch.token_ids), len(batch.context_lens), len(batch.logits_rows)
    for name, size, padding in (
        ("token_ids", tokens, 0),
        ("positions", tokens, 0),
        ("slot_mapping", tokens, -1),
        ("context_lens", sequences, 0),
        ("logits_rows", logits, 0),
    ):
        to = getattr(padded, name)
        to[:size] = getattr(batch, name)
        to[size:] = padding
    padded.query_starts[: sequences + 1] = batch.query_starts
    padded.query_starts[sequences + 1 :] = torch.arange(tokens + 1, tokens + len(padded.query_starts) - sequences)
    padded.block_tables[:sequences, : batch.block_tables.shape[1]] = batch.block_tables
    padded.block_tables[:sequences, batch.block_tables.shape[1] :] = 0
    padded.block_tables[sequences:] = 0
