"""Helpers for the metrics of every process: process statistics, counters kept by other objects, fast histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

#: Text of a counter that routers and workers have.
PEER_MESSAGES_REFUSED = "Messages of other processes without this cluster's secret, or that were here before"


def process_registry() -> CollectorRegistry:
    """A registry with the process's memory, descriptors, CPU time and garbage collections."""
    # Otherwise every counter gets a second series with its creation time.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSource:
    """A counter kept by another object."""

    name: str
    text: str
    value: Callable[[], float]


class CounterReader(Collector):
    """Reads counters from their owners at each scrape, so that these need not know Prometheus."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str], *sources: CounterSource) -> None:
        self._labels = dict(labels)
        self._sources = sources
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The present values."""
        for source in self._sources:
            family = CounterMetricFamily(f"pdserve_{source.name}", source.text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), source.value())
            yield family


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeSource:
    """A number kept by another object; None while it is not known, which exports no sample instead of a false one."""

    name: str
    text: str
    value: Callable[[], float | None]


class GaugeReader(Collector):
    """Reads gauges from their owners at each scrape."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str], *sources: GaugeSource) -> None:
        #: Sources of each gauge, with their labels.
        self._read = dict[str, list[tuple[dict[str, str], GaugeSource]]]()
        self.add(labels, *sources)
        registry.register(self)

    def add(self, labels: Mapping[str, str], *sources: GaugeSource) -> None:
        """Reads these, too. Gauges of one name differ in the values of their labels."""
        for source in sources:
            self._read.setdefault(source.name, []).append((dict(labels), source))

    def collect(self) -> Iterator[Metric]:
        """The present values."""
        for name, read in self._read.items():
            family = GaugeMetricFamily(f"pdserve_{name}", read[0][1].text, labels=list(read[0][0]))
            for labels, source in read:
                value = source.value()
                if value is not None:
                    family.add_metric(list(labels.values()), value)
            yield family


class TokenHistogram:
    """A histogram that is cheap to update on every token. Observed on one thread.

    That of prometheus_client takes two locks and walks the buckets.
    """

    def __init__(self, bounds: Sequence[float], labels: Mapping[str, str]) -> None:
        self.labels = dict(labels)
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts `value` in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily) -> None:
        """Adds the buckets in cumulative form, as Prometheus expects them."""
        total, buckets = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append((floatToGoString(bound), total))  # type: ignore[no-untyped-call]
        family.add_metric(list(self.labels.values()), buckets, self._sum)


class HistogramReader(Collector):
    """Exposes histograms of one name, which differ in the values of their labels."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *histograms: TokenHistogram) -> None:
        self._name = f"pdserve_{name}"
        self._text = text
        self._histograms = list(histograms)
        registry.register(self)

    def add(self, histogram: TokenHistogram) -> None:
        """Exposes this one, too."""
        self._histograms.append(histogram)

    def collect(self) -> Iterator[Metric]:
        """The present buckets."""
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._histograms[0].labels))
        for histogram in self._histograms:
            histogram.add_to(family)
        yield family
