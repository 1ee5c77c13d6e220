"""How what has no heads is split among ranks: one rule for loading weights and gathering logits. No torch."""

from __future__ import annotations


def part_of(total: int, rank: int, size: int) -> slice:
    """The neighbours in [0, total) that belong to a rank: as many for each, one more for the first few if need be."""
    assert 0 <= rank < size
    each, more = divmod(total, size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))
