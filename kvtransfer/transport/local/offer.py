"""An offer of blocks in the sender's memory. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Blocks of one offer: with them it is a packet of less than a socket's buffer holds.
MAX_BLOCKS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Messages of one layer group. Their tags are `first_tag`, `first_tag + tag_step`, and so on."""

    first_tag: int
    tag_step: int
    num_messages: int
    #: Bytes that a block has in the layer group.
    block_bytes: int
    #: int64 [blocks], in the order of the messages: where these bytes begin in the sender's memory.
    starts: npt.NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages."""
        return len(self.starts) * self.block_bytes
