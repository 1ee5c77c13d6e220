"""What the metrics of every process share: the names of the process's own figures, and counters kept elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


def process_registry() -> CollectorRegistry:
    """A registry with the process's memory, descriptors, CPU time and garbage collections."""
    # A second series for every counter, which hardly anybody asks for.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterSource:
    """A number that only grows, kept by the object that counts."""

    name: str
    text: str
    value: Callable[[], float]


class CounterReader(Collector):
    """Reads counters where they are kept, at each scrape: who counts need not know Prometheus."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str], *sources: CounterSource) -> None:
        self._labels = dict(labels)
        self._sources = sources
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """All counters now."""
        for source in self._sources:
            family = CounterMetricFamily(f"pdserve_{source.name}", source.text, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), source.value())
            yield family
