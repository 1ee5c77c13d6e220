"""When the requests of a workload are sent: pure, a seed gives the same times every time."""

from __future__ import annotations

import math
import random
from itertools import accumulate

LINEAR = "linear"
EXPONENTIAL = "exponential"


def steady(count: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """`count` ascending times in seconds, the first 0, at `rate` requests a second; `inf` sends all at once.

    Gaps are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less comes in bursts, more
    is more even. They are scaled to the asked rate, so that a short run offers that load too.
    """
    if math.isinf(rate) or count < 2:
        return [0.0] * count
    gaps = _unit_gaps(count, burstiness, seed)
    scale = (count - 1) / rate / sum(gaps)
    return list(accumulate((gap * scale for gap in gaps), initial=0.0))


def ramp(
    count: int, start_rps: float, end_rps: float, *, strategy: str, burstiness: float = 1.0, seed: int = 0
) -> list[float]:
    """As `steady`, with a rate that goes from `start_rps` to `end_rps` over the requests, linearly or exponentially."""
    gaps = _unit_gaps(count, burstiness, seed)
    rates = [_rate_at(index / max(1, len(gaps) - 1), start_rps, end_rps, strategy) for index in range(len(gaps))]
    return list(accumulate((gap / rate for gap, rate in zip(gaps, rates, strict=True)), initial=0.0))[:count]


def _unit_gaps(count: int, burstiness: float, seed: int) -> list[float]:
    """Gaps between `count` arrivals with a mean of 1 in the long run."""
    draws = random.Random(f"arrivals:{seed}")
    return [draws.gammavariate(burstiness, 1 / burstiness) for _ in range(count - 1)]


def _rate_at(share: float, start_rps: float, end_rps: float, strategy: str) -> float:
    if strategy == EXPONENTIAL:
        return start_rps * math.pow(end_rps / start_rps, share)
    return start_rps + (end_rps - start_rps) * share
