"""What pdserve exports, read off its registries, and what a PromQL query asks for: the two have to fit."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import promql_parser
import yaml

from pdserve.net.admin import Health
from pdserve.worker.serve.metrics import WorkerMetrics
from router_svc.records.metrics import RouterMetrics

ROOT = Path(__file__).parents[2]
RULES = ROOT / "k8s/monitoring/rules"
RUNBOOKS = ROOT / "docs/runbooks"

_PACKAGES = ("pdserve", "router_svc", "worker_svc", "prefill_svc", "decode_svc", "kvtransfer")
_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}
#: Labels that Prometheus, or what discovers its targets, adds to each series.
_OF_TARGETS = {"job", "instance", "namespace", "pod", "container"}
#: Labels whose values are known before the first event.
_CLOSED = {"tier", "outcome", "subject", "direction", "phase", "finished_reason", "le"}
#: Metrics of Prometheus and of kube-state-metrics.
_FOREIGN = re.compile(r"up|ALERTS|kube_\w+")


@dataclass(slots=True)
class Exported:
    """Label names of one sample name, and their values so far."""

    labels: set[str] = field(default_factory=set)
    values: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


@cache
def exported() -> dict[str, Exported]:
    """All samples that routers and workers export, by name."""
    found: dict[str, Exported] = defaultdict(Exported)
    for registry in _registries():
        for family in registry.collect():
            for suffix in _SUFFIXES.get(family.type, ()):
                found[family.name + suffix].labels |= _label_names(registry, family.name)
            for sample in family.samples:
                found[sample.name].labels |= sample.labels.keys()
                for label, value in sample.labels.items():
                    found[sample.name].values[label].add(value)
    for name in _kept_by_others():
        found[name].labels |= {"model_name", "tier"}
        found[name].values["tier"] |= {"router", "prefill", "decode"}
    return dict(found)


def _registries() -> Iterator[object]:
    router = RouterMetrics(model_name="m")
    router.watch_degraded(Health().degraded)
    for tier in ("prefill", "decode"):
        router.set_workers(tier, 1)
        worker = WorkerMetrics(model_name="m", tier=tier)
        worker.describe(*(_own_labels(worker.registry, f"pdserve_{name}_info") for name in ("worker", "kernels")))
        yield worker.registry
    yield router.registry


def _own_labels(registry: object, name: str) -> dict[str, str]:
    """A value for each label that the metric has in addition to those of all metrics."""
    return dict.fromkeys(_label_names(registry, name) - {"model_name", "tier"}, "any")


def _label_names(registry: object, name: str) -> set[str]:
    """Those of a family that has no samples yet. A collector of our own always has samples."""
    collector = registry._names_to_collectors.get(name)  # type: ignore[attr-defined]
    return set(getattr(collector, "_labelnames", ()))


def _kept_by_others() -> set[str]:
    """Samples of the `CounterSource`s and `GaugeSource`s that services make for what other objects keep."""
    suffixes = {"CounterSource": "_total", "GaugeSource": ""}
    texts = (path.read_text(encoding="utf-8") for package in _PACKAGES for path in (ROOT / package).rglob("*.py"))
    calls = [
        node
        for text in texts
        if any(f"{source}(" in text for source in suffixes)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in suffixes
    ]
    return {
        f"pdserve_{ast.literal_eval(keyword.value)}{suffixes[ast.unparse(call.func)]}"
        for call in calls
        for keyword in call.keywords
        if keyword.arg == "name" and isinstance(keyword.value, ast.Constant)
    }


@cache
def recorded() -> set[str]:
    """Names of the recording rules."""
    return {rule["record"] for rule in all_rules() if "record" in rule}


@cache
def all_rules() -> list[dict[str, object]]:
    """The rules of all files."""
    files = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(RULES.glob("*.yaml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


@cache
def alerts() -> dict[str, dict[str, object]]:
    """The alert rules by name."""
    rules = [rule for rule in all_rules() if "alert" in rule]
    by_name = {str(rule["alert"]): rule for rule in rules}
    assert len(by_name) == len(rules), "two alerts have one name"
    return by_name


def selectors(query: str) -> list[promql_parser.VectorSelector]:
    """The series that a query reads. Raises `ValueError` with the position of a syntax error."""
    found = []

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def unknown_in(query: str) -> list[str]:
    """The metrics, labels and label values in a query that nothing exports."""
    unknown = []
    for selector in selectors(query):
        name = selector.name
        if name in recorded() or _FOREIGN.fullmatch(name):
            continue
        known = exported().get(name)
        if known is None:
            unknown.append(name)
            continue
        for matcher in selector.matchers.matchers:
            if matcher.name not in known.labels | _OF_TARGETS:
                unknown.append(f"{name}{{{matcher.name}}}")
            elif matcher.name in _CLOSED and "$" not in matcher.value:
                unknown += [
                    f"{name}{{{matcher.name}={value!r}}}"
                    for value in matcher.value.split("|")
                    if not any(re.fullmatch(value, candidate) for candidate in known.values[matcher.name])
                ]
    return unknown
