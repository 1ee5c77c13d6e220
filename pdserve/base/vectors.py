"""Embeddings as numbers, and how close two of them are."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from math import fsum
from operator import mul


def floats(values: bytes) -> array[float]:
    """The numbers of an embedding, which is little-endian float32."""
    numbers = array("f", values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """The cosine of two vectors of length 1, or 0 of a vector of zeros. Rounded once, whatever the order of terms."""
    return max(-1.0, min(1.0, fsum(map(mul, a, b))))
