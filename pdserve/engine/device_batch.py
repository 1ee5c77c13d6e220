"""Batches on a device: what `BatchBuilder` made, in one copy a step, in memory that stays where it is.

A batch may be padded, so that few shapes occur: a padding row belongs to a sequence of its own with an empty context,
and writes nothing (slot -1).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.model.batch import Batch

#: Fields begin at multiples of 16 bytes.
_ALIGNED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShape:
    """Sizes of a batch's tensors."""

    num_tokens: int
    num_sequences: int
    num_blocks: int
    num_logits: int

    @classmethod
    def of(cls, batch: Batch) -> BatchShape:
        """The shape as it is."""
        return cls(
            num_tokens=len(batch.token_ids),
            num_sequences=len(batch.context_lens),
            num_blocks=batch.block_tables.shape[1],
            num_logits=len(batch.logits_rows),
        )

    @property
    def num_elements(self) -> int:
        """Of memory that holds all fields."""
        return sum(-(-size // _ALIGNED) * _ALIGNED for _, size in self._sizes())

    @property
    def is_decode_only(self) -> bool:
        """One row for each sequence, and the logits of all of them."""
        return self.num_tokens == self.num_sequences == self.num_logits

    def views(self, memory: Tensor) -> Batch:
        """The fields one after the other in `memory`, int64 [num_elements] or more."""
        fields, first = {}, 0
        for name, size in self._sizes():
            fields[name] = memory[first : first + size]
            first += -(-size // _ALIGNED) * _ALIGNED
        fields["block_tables"] = fields["block_tables"].view(self.num_sequences, self.num_blocks)
        return Batch(**fields)

    def _sizes(self) -> Iterator[tuple[str, int]]:
        yield "token_ids", self.num_tokens
        yield "positions", self.num_tokens
        yield "slot_mapping", self.num_tokens
        yield "query_starts", self.num_sequences + 1
        yield "context_lens", self.num_sequences
        yield "block_tables", self.num_sequences * self.num_blocks
        yield "logits_rows", self.num_logits


def current(device: torch.device) -> AbstractContextManager[object]:
    """Within it, launches go to this device: which one is current is a matter of each thread. Not to be nested."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class DeviceBatches:
    """Memory for batches on a device, and its pinned counterpart on the host."""

    def __init__(self, device: torch.device, num_elements: int = 0) -> None:
        """With room for `num_elements`; it grows, to another address, only for a batch that does not fit."""
        self._device = device
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._reserve(num_elements)

    def upload(self, batch: Batch, shape: BatchShape | None = None, token_ids: Tensor | None = None) -> Batch:
        """The batch on the device, padded to `shape`; valid until the next call. Does not wait for the copy.

        `token_ids`: int64 [num_tokens] on the device, to take the place of the batch's; -1, where nothing could be
        drawn, becomes 0. A step that reads the last batch may be under way: copies and steps follow in one stream.
        """
        shape = shape or BatchShape.of(batch)
        size = shape.num_elements
        if size > len(self._host):
            self._reserve(2 * size)
        if self._copied is not None:
            # Made long ago, or about to be: the only step that can be under way is the one that it was made for.
            self._copied.synchronize()
        _fill(shape.views(self._host), batch)
        self._there[:size].copy_(self._host[:size], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        there = shape.views(self._there)
        if token_ids is not None:
            torch.clamp(token_ids, min=0, out=there.token_ids[: len(token_ids)])
        return there

    def _reserve(self, num_elements: int) -> None:
        self._host = torch.zeros(num_elements, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        self._there = torch.zeros(num_elements, dtype=torch.int64, device=self._device)


def _fill(padded: Batch, batch: Batch) -> None:
    """Copies `batch` and writes what stands for padding rows."""
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
