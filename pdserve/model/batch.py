"""Input of one forward pass: rows of several sequences, the slots of their KV, and the rows whose logits are requested.

token_ids      a0 a1 a2 | b7 | c4 c5      three sequences: a prefill from 0, a decode row, a chunk in the middle
positions       0  1  2 |  7 |  4  5
query_starts    0         3    4      6
context_lens    3         8    6          each row attends to positions up to its own
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.ops import KvRows

#: The fields of a batch that are tensors.
TENSORS = (
    "token_ids",
    "positions",
    "slot_mapping",
    "query_starts",
    "context_lens",
    "block_tables",
    "logits_rows",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Input of `Decoder.forward`; tensors are int64. Written blocks must belong to the sequence alone."""

    #: [num_tokens]
    token_ids: Tensor
    #: [num_tokens] absolute position of each row, consecutive within a sequence.
    positions: Tensor
    #: [num_tokens] slot = block_id * block_size + offset to which the row's K and V are written.
    slot_mapping: Tensor
    #: [num_sequences + 1]; rows [query_starts[i], query_starts[i + 1]) belong to sequence i.
    query_starts: Tensor
    #: [num_sequences] tokens in the context, including this step's rows.
    context_lens: Tensor
    #: [num_sequences, max_blocks], padded with 0.
    block_tables: Tensor
    #: [num_logits] rows whose logits are requested; may be empty.
    logits_rows: Tensor
    #: Hidden states of these rows after the final norm are requested instead of logits.
    hidden_only: bool = False

    def to(self, device: torch.device) -> Batch:
        """A copy on another device."""
        return replace(self, **{name: getattr(self, name).to(device) for name in TENSORS})

    def kv_rows(self) -> KvRows:
        """The fields of `kernels.ops.KvRows`."""
        return KvRows(
            positions=self.positions,
            slot_mapping=self.slot_mapping,
            query_starts=self.query_starts,
            context_lens=self.context_lens,
            block_tables=self.block_tables,
        )
