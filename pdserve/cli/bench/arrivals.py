"""Send times of a workload's requests. Pure: the same seed gives the same times."""

from __future__ import annotations

import math
import random
from itertools import accumulate

LINEAR = "linear"
EXPONENTIAL = "exponential"


def steady(count: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """`count` ascending times in seconds from 0, at `rate` requests per second; `inf` sends all at once.

    Gaps are sampled from a gamma distribution of shape `burstiness`: 1 is a Poisson process, lower values give bursts,
    higher values more even gaps. They are scaled so that even a short run has exactly the requested rate.
    """
    if math.isinf(rate) or count < 2:
        return [0.0] * count
    gaps = _unit_gaps(count, burstiness, seed)
    scale = (count - 1) / rate / sum(gaps)
    return list(accumulate((gap * scale for gap in gaps), initial=0.0))


def ramp(
    count: int, start_rps: float, end_rps: float, *, strategy: str, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """Like `steady`, with a rate that changes linearly or exponentially from `start_rps` to `end_rps`."""
    gaps = _unit_gaps(count, burstiness, seed)
    rates = [_rate_at(index / max(1, len(gaps) - 1), start_rps, end_rps, strategy) for index in range(len(gaps))]
    return list(accumulate((gap / rate for gap, rate in zip(gaps, rates, strict=True)), initial=0.0))[:count]


def _unit_gaps(count: int, burstiness: float, seed: int) -> list[float]:
    """Gaps between `count` arrivals, with an expected mean of 1."""
    rng = random.Random(f"arrivals:{seed}")
    return [rng.gammavariate(burstiness, 1 / burstiness) for _ in range(count - 1)]


def _rate_at(share: float, start_rps: float, end_rps: float, strategy: str) -> float:
    if strategy == EXPONENTIAL:
        return start_rps * math.pow(end_rps / start_rps, share)
    return start_rps + (end_rps - start_rps) * share
