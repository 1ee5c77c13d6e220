"""How blocks become messages: groups of consecutive layers of consecutive blocks. Pure.

A bundle is a run of blocks of a transfer that travel together; it may be a single block. The memory of a bundle is
ordered by group, and within a group by block:

    layers 0-3 of block 0 | layers 0-3 of block 1 | layers 4-7 of block 0 | layers 4-7 of block 1
    '------------- message 0 ------------------'   '------------- message 1 ------------------'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kernels.split import even_slice
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout


def span_of(layers: slice, num_layers: int, num_bytes: int) -> slice:
    """Byte range of `layers` (of `num_layers`) in the `num_bytes` of a bundle or a block."""
    layer_bytes = num_bytes // num_layers
    return slice(layers.start * layer_bytes, layers.stop * layer_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """The layer groups of one transfer, in the order in which a forward pass completes them.

    Their sizes differ by one layer at most.
    """

    #: Layers of each group, and their byte range in a block.
    layers: tuple[slice, ...]
    spans: tuple[slice, ...]

    @classmethod
    def of(cls, layout: KvLayout, count: int) -> LayerGroups:
        """`count` groups, at most one for each layer."""
        assert 1 <= count <= layout.num_layers
        layers = tuple(even_slice(layout.num_layers, group, count) for group in range(count))
        spans = tuple(span_of(group, layout.num_layers, layout.block_bytes) for group in layers)
        return cls(layers=layers, spans=spans)

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.layers)

    @property
    def ends(self) -> tuple[int, ...]:
        """Number of layers after which each group is complete, ascending."""
        return tuple(group.stop for group in self.layers)

    @property
    def max_block_bytes(self) -> int:
        """Bytes per block in the largest group."""
        return int(self.spans[0].stop)

    def span(self, group: int, num_blocks: int) -> slice:
        """Byte range of a group's message in the memory of a bundle of `num_blocks`."""
        return slice(num_blocks * self.spans[group].start, num_blocks * self.spans[group].stop)

    def num_completed_by(self, num_layers: int) -> int:
        """Number of groups that layers [0, num_layers) complete."""
        return sum(end <= num_layers for end in self.ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferShape:
    """How the blocks of one transfer are cut into bundles, and bundles into messages.

    Message `index` is layer group `index % layer_groups` of bundle `index // layer_groups`.
    """

    num_blocks: int
    #: Blocks in each bundle; the last bundle may have fewer.
    bundle_blocks: int
    #: Messages in each bundle.
    layer_groups: int

    @property
    def num_bundles(self) -> int:
        """Number of bundles, the last one included."""
        return -(-self.num_blocks // self.bundle_blocks)

    @property
    def num_messages(self) -> int:
        """Number of messages."""
        return self.num_bundles * self.layer_groups

    def bundles(self, block_ids: Sequence[BlockId]) -> list[Sequence[BlockId]]:
        """Cuts blocks of the transfer, which start with a bundle, into bundles."""
        size = self.bundle_blocks
        return [block_ids[first : first + size] for first in range(0, len(block_ids), size)]

    def name(self, index: int) -> str:
        """A message's name in error texts: `block 3`, or `layer group 1 of bundle 3`."""
        bundle, group = divmod(index, self.layer_groups)
        return f"{self._unit} {bundle}" if self.layer_groups == 1 else f"layer group {group} of {self._unit} {bundle}"

    def __str__(self) -> str:
        """All messages, in error texts: `12 blocks`, or `24 layer groups of 12 bundles`."""
        groups = "" if self.layer_groups == 1 else f"{self.num_messages} layer groups of "
        return f"{groups}{self.num_bundles} {self._unit}s"

    @property
    def _unit(self) -> str:
        return "block" if self.bundle_blocks == 1 else "bundle"
