"""Histograms are exposed as those of prometheus_client are."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pdserve.observe.metrics import HistogramReader, TokenHistogram

BOUNDS = (0.01, 0.5, 2.0)


def exposition(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@pytest.mark.parametrize("values", [(), (0.01,), (0.0, 0.5, 0.500001, 2.0, 7.0, 7.0)])
def test_a_token_histogram_is_exposed_like_that_of_prometheus_client(values: tuple[float, ...]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    reference = Histogram("pdserve_gap_seconds", "Gaps", ["tier", "phase"], buckets=BOUNDS, registry=theirs)
    histograms = [TokenHistogram(BOUNDS, {"tier": "decode", "phase": phase}) for phase in ("a", "b")]
    HistogramReader(ours, "gap_seconds", "Gaps", *histograms)
    for histogram in histograms:
        child = reference.labels(**histogram.labels)
        for value in values:
            histogram.observe(value)
            child.observe(value)
    assert exposition(ours) == exposition(theirs)
