"""Which decode steps are recorded as graphs, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from pdserve.engine.device_batch import BatchShape

#: Maximum number of graphs: enough for all shapes of up to 256 sequences of up to 2,048 blocks. Each graph takes a few
#: MiB in addition to the memory that all share.
MAX_GRAPHS = 144
#: Smallest padded width of block tables; larger ones are powers of two.
_MIN_BLOCKS = 16
#: Up to this many sequences, batches are padded to a power of two; beyond, to a multiple of it.
_STEP = 8
#: Beyond this many sequences, batches are padded to a multiple of `_LARGE_STEP`.
_LARGE, _LARGE_STEP = 64, 32
#: Widths of block tables, besides the largest, that are recorded at the start.
_COMMON_BLOCKS = (256, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphShapes:
    """The shapes of graphs, each in the order of recording."""

    #: Recorded before a worker is ready. The largest is the first, so that the others fit into its memory.
    at_start: tuple[BatchShape, ...]
    #: Recorded while there is no work: until then, larger graphs take their steps.
    when_idle: tuple[BatchShape, ...] = ()

    @property
    def largest(self) -> BatchShape:
        """The shape with space for every step that is replayed."""
        return self.at_start[0]


def plan_graphs(max_num_seqs: int, max_blocks: int, *, any_width: bool, max_graphs: int = MAX_GRAPHS) -> GraphShapes:
    """The graphs for up to `max_num_seqs` sequences of up to `max_blocks` blocks.

    `any_width`: attention takes as many programs for wide block tables as for narrow ones, so that one width serves
    every step. Otherwise narrower ones are recorded as well, the common ones and powers of two of sequences first.
    """
    largest = decode_shape(max_num_seqs, max_blocks)
    counts = sorted({decode_shape(count, 1).num_sequences for count in range(1, max_num_seqs + 1)})
    common = [count for count in counts if count & (count - 1) == 0 or count == largest.num_sequences]
    others = [count for count in counts if count not in common]
    widths = [] if any_width else list(_powers_of_two(_MIN_BLOCKS, largest.num_blocks))
    first = [max_blocks, *(width for width in _COMMON_BLOCKS if width in widths)]
    at_start = [decode_shape(count, width) for width, count in product(first, reversed(common))]
    when_idle = [decode_shape(count, width) for width, count in product(widths, common)]
    when_idle += [decode_shape(count, width) for width, count in product([*widths, max_blocks], others)]
    ordered = list(dict.fromkeys((*at_start, *when_idle)))[:max_graphs]
    return GraphShapes(at_start=tuple(ordered[: len(at_start)]), when_idle=tuple(ordered[len(at_start) :]))


def decode_shape(num_sequences: int, num_blocks: int) -> BatchShape:
    """The padded shape for `num_sequences` sequences with block tables of width `num_blocks`."""
    step = _LARGE_STEP if num_sequences > _LARGE else _STEP
    rows = -(-num_sequences // step) * step if num_sequences > _STEP else _power_of_two(num_sequences)
    return BatchShape(
        num_tokens=rows, num_sequences=rows, num_logits=rows, num_blocks=max(_MIN_BLOCKS, _power_of_two(num_blocks))
    )


def _powers_of_two(first: int, end: int) -> Iterator[int]:
    while first < end:
        yield first
        first *= 2


def _power_of_two(minimum: int) -> int:
    return 1 << max(0, minimum - 1).bit_length()
