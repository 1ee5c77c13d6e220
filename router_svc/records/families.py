"""Metric families of a router: one prefix, the common labels, and counters that exist from the start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

from router_svc.records.usage import TenantTotals

AnyFamily = TypeVar("AnyFamily", bound=MetricWrapperBase)


class CounterBy:
    """A counter with one more label. The values that are known exist from the start, at 0.

    A series that appeared with its first event would hide that event: Prometheus sees no increase from nothing to 1.
    """

    def __init__(self, counter: Counter, common: tuple[str, ...], known: Iterable[str]) -> None:
        self._counter = counter
        self._common = common
        for value in known:
            self._counter.labels(*common, value)

    def inc(self, value: str) -> None:
        """Counts one event with this value of the label."""
        self._counter.labels(*self._common, value).inc()


class GaugeBy:
    """A gauge with one more label."""

    def __init__(self, gauge: Gauge, common: tuple[str, ...]) -> None:
        self._gauge = gauge
        self._common = common

    def at(self, value: str) -> Gauge:
        """The gauge with this value of the label."""
        return self._gauge.labels(*self._common, value)


class Families:
    """Makes metric families of one registry.

    Each has the labels `model_name` and `tier`. The tier is `router`, unless the family's own label is a tier. Those of
    several models are the same families: a family that another model has already made is taken from it.
    """

    def __init__(
        self, registry: CollectorRegistry, model_name: str, made: dict[str, MetricWrapperBase] | None = None
    ) -> None:
        self.registry = registry
        self.common = {"model_name": model_name, "tier": "router"}
        self._made = {} if made is None else made

    def of_model(self, model_name: str) -> Families:
        """The same families for another model."""
        return Families(self.registry, model_name, self._made)

    def family(
        self, kind: type[AnyFamily], name: str, text: str, labels: Iterable[str], **options: object
    ) -> AnyFamily:
        """A family without a value for any label."""
        found = self._made.get(name)
        if found is None:
            made = kind(f"pdserve_{name}", text, tuple(labels), registry=self.registry, **options)  # type: ignore[arg-type]
            self._made[name] = made
            return made
        assert isinstance(found, kind)
        return found

    def gauge(self, name: str, text: str) -> Gauge:
        """A gauge without more labels."""
        return self.family(Gauge, name, text, self.common).labels(**self.common)

    def gauge_by(self, label: str, name: str, text: str) -> GaugeBy:
        """A gauge with one more label."""
        return GaugeBy(self.family(Gauge, name, text, self._labels(label)), self._values(label))

    def counter(self, name: str, text: str) -> Counter:
        """A counter without more labels."""
        return self.family(Counter, name, text, self.common).labels(**self.common)

    def counter_by(self, label: str, name: str, text: str, known: Iterable[str]) -> CounterBy:
        """A counter with one more label, of which these values are known."""
        return CounterBy(self.family(Counter, name, text, self._labels(label)), self._values(label), known)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram without more labels."""
        return self.family(Histogram, name, text, self.common, buckets=buckets).labels(**self.common)

    def histograms_by(
        self, label: str, name: str, text: str, buckets: tuple[float, ...], known: Iterable[str]
    ) -> dict[str, Histogram]:
        """A histogram with one more label, by the values of that label."""
        histogram = self.family(Histogram, name, text, self._labels(label), buckets=buckets)
        return {value: histogram.labels(*self._values(label), value) for value in known}

    def _labels(self, label: str) -> list[str]:
        return [*(name for name in self.common if name != label), label]

    def _values(self, label: str) -> tuple[str, ...]:
        return tuple(value for name, value in self.common.items() if name != label)


class TenantReader(Collector):
    """Reads the usage of tenants at each scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._read = list[tuple[dict[str, str], TenantTotals]]()
        registry.register(self)

    def add(self, common: dict[str, str], totals: TenantTotals) -> None:
        """Reads these totals, too, under the common labels of a model."""
        self._read.append((common, totals))

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The present totals."""
        names = [*(self._read[0][0] if self._read else ()), "tenant"]
        requests = CounterMetricFamily("pdserve_tenant_requests", "Client requests ended, by tenant", labels=names)
        tokens = CounterMetricFamily(
            "pdserve_tenant_tokens", "Tokens of client requests, by tenant", labels=[*names, "kind"]
        )
        for labels, totals in self._read:
            common = [*labels.values()]
            for tenant, usage in totals.by_label().items():
                requests.add_metric([*common, tenant], usage.requests)
                kinds = {"input": usage.input_tokens, "cached": usage.cached_tokens, "output": usage.output_tokens}
                for kind, count in kinds.items():
                    tokens.add_metric([*common, tenant, kind], count)
        yield requests
        yield tokens
