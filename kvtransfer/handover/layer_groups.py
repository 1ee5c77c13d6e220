"""How blocks become messages: groups of neighbouring layers of neighbouring blocks. Pure.

A bundle is some blocks of a transfer, side by side; with one block for each, it is the block. In the memory of a bundle
group comes after group, and in a group block after block:

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
    """Where layers of `num_layers` are in the memory of a bundle, or of a block, of `num_bytes`."""
    layer_bytes = num_bytes // num_layers
    return slice(layers.start * layer_bytes, layers.stop * layer_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """The groups of one transfer, in the order in which a forward pass completes them; their sizes differ by a layer.

    Message `index` of the transfer is group `index % count` of its bundle `index // count`.
    """

    #: Of each group: its layers, and where in a block their bytes are.
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
        """How many there are."""
        return len(self.layers)

    @property
    def ends(self) -> tuple[int, ...]:
        """After so many layers a group is complete, ascending."""
        return tuple(group.stop for group in self.layers)

    @property
    def max_block_bytes(self) -> int:
        """Of one block in the largest message."""
        return int(self.spans[0].stop)

    def span(self, group: int, num_blocks: int) -> slice:
        """Where a group's message is in the memory of a bundle."""
        return slice(num_blocks * self.spans[group].start, num_blocks * self.spans[group].stop)

    def num_completed_by(self, num_layers: int) -> int:
        """Groups that layers [0, num_layers) complete."""
        return sum(end <= num_layers for end in self.ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundles:
    """The bundles of one transfer: `size` blocks in each, in its last one what is left."""

    num_blocks: int
    size: int

    @property
    def count(self) -> int:
        """How many there are."""
        return -(-self.num_blocks // self.size)

    @property
    def unit(self) -> str:
        """What people call one."""
        return "block" if self.size == 1 else "bundle"

    def of(self, block_ids: Sequence[BlockId]) -> list[Sequence[BlockId]]:
        """Blocks of the transfer, from the first of a bundle on, bundle by bundle."""
        return [block_ids[first : first + self.size] for first in range(0, len(block_ids), self.size)]


def message_name(index: int, layer_groups: int, unit: str) -> str:
    """What people call it: `block 3`, or `group 1 of bundle 3`."""
    bundle, group = divmod(index, layer_groups)
    return f"{unit} {bundle}" if layer_groups == 1 else f"group {group} of {unit} {bundle}"


def messages(num_bundles: int, layer_groups: int, unit: str) -> str:
    """All of them: `12 blocks`, or `24 parts of 12 bundles`."""
    parts = "" if layer_groups == 1 else f"{num_bundles * layer_groups} parts of "
    return f"{parts}{num_bundles} {unit}s"
