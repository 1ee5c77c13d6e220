"""Sums of hidden states, and the embeddings that are made of them. Pure."""

from __future__ import annotations

from math import fsum, sqrt

import numpy as np
import numpy.typing as npt

from pdserve.base.pooling import Pooling


class HiddenSum:
    """The sum of some hidden states of one prompt, in double precision and in the order of their positions.

    Rows are added one by one, so the chunks in which they come change no bit.
    """

    def __init__(self) -> None:
        self._sum: npt.NDArray[np.float64] | None = None
        self._count = 0

    def add(self, rows: npt.NDArray[np.float32]) -> None:
        """Add hidden states, [num_rows, hidden_size], which follow those that were added before."""
        for row in rows:
            if self._sum is None:
                self._sum = row.astype(np.float64)
            else:
                np.add(self._sum, row, out=self._sum)
        self._count += len(rows)

    def embedding(self, pooling: Pooling) -> bytes | None:
        """The mean of what was added, cut to its first dimensions, then divided by its length: little-endian float32.

        A vector of zeros has no direction and stays as it is. None: it has numbers that are not finite.
        """
        assert self._sum is not None, "a prompt has a token"
        mean = (self._sum / self._count)[: pooling.dimensions or None]
        if not np.isfinite(mean).all():
            return None
        if pooling.normalizes:
            # Squares of float32 are far within double precision. `fsum` rounds once, whatever the order.
            mean = mean / (sqrt(fsum((mean * mean).tolist())) or 1.0)
        with np.errstate(over="ignore"):
            values = mean.astype("<f4")
        return values.tobytes() if np.isfinite(values).all() else None
