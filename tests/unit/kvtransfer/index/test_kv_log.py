"""Positions in the stream of KV events."""

from __future__ import annotations

import pytest

from kvtransfer.index.kv_log import StreamPosition


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((7, 1), (7, 2), True),
        ((7, 1), (7, 3), False),
        ((7, 2), (7, 2), False),
        ((7, 1), (8, 2), False),
        ((0, 0), (7, 1), True),
        ((0, 0), (7, 2), False),
    ],
)
def test_a_position_precedes_only_its_direct_successor(
    before: tuple[int, int], after: tuple[int, int], expected: bool
) -> None:
    first, second = (
        StreamPosition(generation=generation, sequence=sequence) for generation, sequence in (before, after)
    )
    assert first.precedes(second) is expected
