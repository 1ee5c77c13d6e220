"""How blocks become messages: groups of consecutive layers of consecutive blocks. Pure.

A bundle is a run of blocks of a transfer that travel together; it may be a single block. The memory of a bundle is
ordered by layer group, and within a layer group by block:

    layers 0-3 of block 0 | layers 0-3 of block 1 | layers 4-7 of block 0 | layers 4-7 of block 1
    '------------- message 0 ------------------'   '------------- message 1 ------------------'

A bundle and a layer group belong to one KV group of the layout. Bundles, layer groups and messages are numbered KV
group by KV group: those of the first one come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kernels.split import even_slice
from pdserve.base.ids import BlockId
from pdserve.base.layout import KvLayout


def span_of(layers: slice, num_layers: int, num_bytes: int) -> slice:
    """Byte range of `layers` (of `num_layers`) in the `num_bytes` of a bundle or a block."""
    layer_bytes = num_bytes // num_layers
    return slice(layers.start * layer_bytes, layers.stop * layer_bytes)


def layer_groups_of(layout: KvLayout, count: int) -> tuple[int, ...]:
    """Number of layer groups of each KV group: `count`, or one for each of its layers if it has fewer."""
    return tuple(min(count, group.num_layers) for group in layout.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroups:
    """The layer groups of one transfer. Those of a KV group are in the order in which a forward pass completes them.

    The sizes of a KV group's layer groups differ by one layer at most.
    """

    #: Layers of each group, counted within its KV group, and their byte range in a block.
    layers: tuple[slice, ...]
    spans: tuple[slice, ...]
    #: Number of the model's layers after which each group is complete.
    ends: tuple[int, ...]
    #: KV group of each.
    kv_groups: tuple[int, ...]

    @classmethod
    def of(cls, layout: KvLayout, count: int) -> LayerGroups:
        """`count` groups for each KV group, at most one for each of its layers."""
        assert 1 <= count <= layout.num_layers
        counts = layer_groups_of(layout, count)
        cut = [
            (kv_group, group, even_slice(group.num_layers, layer_group, counts[kv_group]))
            for kv_group, group in enumerate(layout.groups)
            for layer_group in range(counts[kv_group])
        ]
        return cls(
            layers=tuple(layers for _, _, layers in cut),
            spans=tuple(span_of(layers, group.num_layers, layout.block_bytes) for _, group, layers in cut),
            ends=tuple(group.layers[layers.stop - 1] + 1 for _, group, layers in cut),
            kv_groups=tuple(kv_group for kv_group, _, _ in cut),
        )

    @property
    def count(self) -> int:
        """Number of groups."""
        return len(self.layers)

    @property
    def report_layers(self) -> tuple[int, ...]:
        """Numbers of the model's layers that complete a group, ascending."""
        return tuple(sorted(set(self.ends)))

    @property
    def max_block_bytes(self) -> int:
        """Bytes per block in the largest group."""
        return max(int(span.stop) - int(span.start) for span in self.spans)

    def span(self, group: int, num_blocks: int) -> slice:
        """Byte range of a group's message in the memory of a bundle of `num_blocks`."""
        return slice(num_blocks * self.spans[group].start, num_blocks * self.spans[group].stop)

    def completed_by(self, num_layers: int) -> list[int]:
        """The groups that the model's layers [0, num_layers) complete."""
        return [group for group, end in enumerate(self.ends) if end <= num_layers]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvGroupShape:
    """The segment of a transfer that belongs to one KV group."""

    num_blocks: int
    #: Blocks in each bundle; the last bundle may have fewer.
    bundle_blocks: int
    #: Messages in each bundle.
    layer_groups: int
    num_bundles: int
    #: Its bundles, layer groups and messages, as the transfer numbers them.
    first_bundle: int
    first_layer_group: int
    first_message: int
    stop_message: int


@dataclass(frozen=True, slots=True)
class TransferShape:
    """How the blocks of one transfer are cut into bundles, and bundles into messages.

    Message `index` of the first KV group is layer group `index % layer_groups` of bundle `index // layer_groups`.
    """

    #: One for each KV group.
    segments: tuple[KvGroupShape, ...]
    num_messages: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_messages", self.segments[-1].stop_message)

    @classmethod
    def of(cls, *, num_blocks: Sequence[int], layer_groups: Sequence[int], bundle_blocks: int) -> TransferShape:
        """`num_blocks` and `layer_groups`: of each KV group."""
        segments: list[KvGroupShape] = []
        message = bundle = layer_group = 0
        for count, num_layer_groups in zip(num_blocks, layer_groups, strict=True):
            num_bundles = -(-count // bundle_blocks)
            segment = KvGroupShape(
                num_blocks=count,
                bundle_blocks=bundle_blocks,
                layer_groups=num_layer_groups,
                num_bundles=num_bundles,
                first_bundle=bundle,
                first_layer_group=layer_group,
                first_message=message,
                stop_message=message + num_bundles * num_layer_groups,
            )
            segments.append(segment)
            message = segment.stop_message
            bundle += num_bundles
            layer_group += num_layer_groups
        return cls(tuple(segments))

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all KV groups."""
        return sum(segment.num_blocks for segment in self.segments)

    @property
    def num_bundles(self) -> int:
        """Number of bundles."""
        return sum(segment.num_bundles for segment in self.segments)

    @property
    def num_layer_groups(self) -> int:
        """Number of layer groups of all KV groups."""
        return sum(segment.layer_groups for segment in self.segments)

    def bundles(self, block_ids: Sequence[BlockId]) -> list[Sequence[BlockId]]:
        """Cuts blocks of a KV group, which start with a bundle, into bundles."""
        size = self.segments[0].bundle_blocks
        return [block_ids[first : first + size] for first in range(0, len(block_ids), size)]

    def bundle_of(self, index: int) -> int:
        """The bundle of a message."""
        for segment in self.segments:
            if index < segment.stop_message:
                break
        return segment.first_bundle + (index - segment.first_message) // segment.layer_groups

    def layer_group_of(self, index: int) -> int:
        """The layer group of a message; for one that does not exist, a layer group that has no such message."""
        for segment in self.segments:
            if index < segment.stop_message:
                break
        return segment.first_layer_group + (index - segment.first_message) % segment.layer_groups

    def indices_of(self, layer_group: int) -> range:
        """The messages of a layer group, one for each bundle of its KV group."""
        segment = next(segment for segment in reversed(self.segments) if segment.first_layer_group <= layer_group)
        first = segment.first_message + layer_group - segment.first_layer_group
        return range(first, segment.stop_message, segment.layer_groups)

    def run(self, index: int, count: int) -> range:
        """Message `index` and those behind it in its layer group, `count` in all; fewer if there are no more."""
        indices = self.indices_of(self.layer_group_of(index))
        if index not in indices:
            return range(0)
        first = indices.index(index)
        return indices[first : first + count]

    def name(self, index: int) -> str:
        """A message's name in error texts: `block 3`, or `layer group 1 of bundle 3`."""
        bundle, group = self.bundle_of(index), self.layer_group_of(index)
        return f"{self._unit} {bundle}" if self._is_whole else f"layer group {group} of {self._unit} {bundle}"

    def __str__(self) -> str:
        """All messages, in error texts: `12 blocks`, or `24 layer groups of 12 bundles`."""
        groups = "" if self._is_whole else f"{self.num_messages} layer groups of "
        return f"{groups}{self.num_bundles} {self._unit}s"

    @property
    def _is_whole(self) -> bool:
        """Whether a message has all layers of its KV group."""
        return all(segment.layer_groups == 1 for segment in self.segments)

    @property
    def _unit(self) -> str:
        return "block" if self.segments[0].bundle_blocks == 1 else "bundle"
