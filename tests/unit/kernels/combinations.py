"""Combinations of test parameters: all at full depth (`tests.support.depth`), otherwise each value at least once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tests.support.depth import IS_FULL


def combinations(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Tuples with one value of each parameter."""
    if IS_FULL:
        return list(itertools.product(*parameters))
    count = max(map(len, parameters))
    return [tuple(values[index % len(values)] for values in parameters) for index in range(count)]
