"""How ranks split a dimension that has no heads: one rule for loading weights and for gathering logits. No torch."""

from __future__ import annotations


def even_slice(total: int, index: int, count: int) -> slice:
    """Slice `index` of [0, total) cut into `count` adjacent slices, of which the first ones may be longer by one."""
    assert 0 <= index < count
    size, remainder = divmod(total, count)
    start = index * size + min(index, remainder)
    return slice(start, start + size + (index < remainder))
