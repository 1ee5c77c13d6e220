"""How a block is cut into messages: groups of neighbouring layers, each one range of the block's bytes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.split import part_of
from pdserve.base.layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """The groups of one transfer, in the order in which a forward pass completes them; their sizes differ by a layer.

    Message `index` of the transfer is group `index % count` of its block `index // count`.
    """

    #: Of each group: its layers, and where in a block their bytes are.
    layers: tuple[slice, ...]
    spans: tuple[slice, ...]

    @classmethod
    def of(cls, layout: KvLayout, count: int) -> LayerGroups:
        """`count` groups, at most one for each layer."""
        assert 1 <= count <= layout.num_layers
        layers = tuple(part_of(layout.num_layers, group, count) for group in range(count))
        layer_bytes = layout.block_bytes // layout.num_layers
        return cls(layers=layers, spans=tuple(slice(g.start * layer_bytes, g.stop * layer_bytes) for g in layers))

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.layers)

    @property
    def ends(self) -> tuple[int, ...]:
        """After so many layers a group is complete, ascending."""
        return tuple(group.stop for group in self.layers)

    @property
    def most_bytes(self) -> int:
        """Of the largest message."""
        return int(self.spans[0].stop)

    def num_within(self, num_layers: int) -> int:
        """Groups that layers [0, num_layers) complete."""
        return sum(end <= num_layers for end in self.ends)


def message_name(index: int, layer_groups: int) -> str:
    """What people call it: `block 3`, or `group 1 of block 3`."""
    block, group = divmod(index, layer_groups)
    return f"block {block}" if layer_groups == 1 else f"group {group} of block {block}"


def messages(num_blocks: int, layer_groups: int) -> str:
    """All of them: `12 blocks`, or `24 parts of 12 blocks`."""
    return f"{num_blocks} blocks" if layer_groups == 1 else f"{num_blocks * layer_groups} parts of {num_blocks} blocks"
