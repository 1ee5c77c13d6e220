"""Series of a cluster as Prometheus scrapes them, for promtool's tests of the recording rules."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.arch.documents import ROOT

RULES = ROOT / "k8s/monitoring/rules/autoscaling.yaml"
BACKLOG = "pdserve:prefill_backlog:seconds"
DEMAND = "pdserve:decode_kv_demand:workers"
STREAMS = "pdserve:router_streams:sum"

#: Samples in promtool's notation, one each 15 s: a value and `xN` more of it, `_` for none, `stale` for the end.
Values = str | float
#: The tests look at the result at this time, after 20 scrapes.
LOOK_AT = "5m"


@dataclass
class Cluster:
    """Series of one model in one namespace, all of them constant unless a test replaces their values."""

    model: str = "m"
    namespace: str = "n"
    series: dict[str, Values] = field(default_factory=dict)

    def ready(self, *, prefill: float, decode: float, router: str = "r0") -> Cluster:
        """A router that sees so many ready workers and has no request."""
        self._add("workers_ready", "prefill", router, prefill)
        self._add("workers_ready", "decode", router, decode)
        for name in ("num_requests_running", "num_requests_waiting", "prefill_backlog_seconds"):
            self._add(name, "router", router, 0)
        return self

    def prefill(self, pod: str, **values: Values) -> Cluster:
        """An idle prefill worker with 100 KV blocks, apart from `values`."""
        idle: Mapping[str, Values] = {
            "prefill_backlog_seconds": 0,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_blocks": 100,
        }
        return self.replace("prefill", pod, **{**idle, **values})

    def decode(self, pod: str, **values: Values) -> Cluster:
        """An idle decode worker with 1,000 KV blocks and 8 sequences, apart from `values`."""
        idle: Mapping[str, Values] = {
            "prefill_backlog_seconds": 0,
            "num_requests_running": 0,
            "num_requests_waiting": 0,
            "kv_blocks": 1000,
            "kv_blocks_held": 0,
            "kv_blocks_reserved": 0,
            "kv_blocks_waiting": 0,
            "max_num_seqs": 8,
        }
        return self.replace("decode", pod, **{**idle, **values})

    def replace(self, tier: str, pod: str, **values: Values) -> Cluster:
        """Sets series of one process."""
        for name, samples in values.items():
            self._add(name, tier, pod, samples)
        return self

    def without(self, pod: str) -> Cluster:
        """The cluster, of which one process is not scraped."""
        self.series = {name: samples for name, samples in self.series.items() if f'pod="{pod}"' not in name}
        return self

    def _add(self, name: str, tier: str, pod: str, samples: Values) -> None:
        labels = {"model_name": self.model, "tier": tier, "namespace": self.namespace, "pod": pod}
        present = ",".join(f"{label}={json.dumps(value)}" for label, value in labels.items() if value)
        self.series[f"pdserve_{name}{{{present}}}"] = samples


def promtool_test(clusters: list[Cluster], expected: Mapping[str, Mapping[tuple[str, str], float]]) -> str:
    """The test file: what each record is at `LOOK_AT`, by model and namespace."""
    series = [
        {"series": name, "values": samples if isinstance(samples, str) else f"{samples}x30"}
        for cluster in clusters
        for name, samples in cluster.series.items()
    ]
    checks = [
        {
            "expr": record,
            "eval_time": LOOK_AT,
            "exp_samples": [{"labels": _labels(record, *who), "value": value} for who, value in found.items()],
        }
        for record, found in expected.items()
    ]
    test = {"interval": "15s", "input_series": series, "promql_expr_test": checks}
    # JSON is YAML.
    return json.dumps({"rule_files": [str(Path(RULES))], "evaluation_interval": "15s", "tests": [test]})


def _labels(record: str, model: str, namespace: str) -> str:
    space = f',namespace="{namespace}"' if namespace else ""
    return f'{record}{{model_name="{model}"{space}}}'
