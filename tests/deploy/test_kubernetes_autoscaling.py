"""Autoscalers: one for each tier, which grows with its work and never shrinks because Prometheus is away."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.deploy.autoscaling.hpa import Autoscaler, replay
from tests.deploy.manifests import LOADER, documents, of_kind, services, title
from tests.deploy.render import K8S, MONITORING

TARGETS = {"StatefulSet/pdserve-prefill", "StatefulSet/pdserve-decode", "Deployment/pdserve-router"}
SERIES = {
    "prefill": "pdserve:prefill_backlog:seconds",
    "decode": "pdserve:decode_kv_demand:workers",
    "router": "pdserve:router_streams:sum",
}


def component(document: dict[str, Any]) -> str:
    return str(document["metadata"]["labels"]["app.kubernetes.io/component"])


def scaled_by_keda(name: str = "keda") -> dict[str, dict[str, Any]]:
    return {component(each): each["spec"] for each in of_kind(name, "ScaledObject")}


def scaled_by_hpa() -> dict[str, dict[str, Any]]:
    return {component(each): each["spec"] for each in of_kind("hpa", "HorizontalPodAutoscaler")}


@pytest.mark.parametrize("name", ["keda", "hpa", "example"])
def test_each_tier_has_one_autoscaler_which_alone_decides_its_replicas(name: str) -> None:
    scalers = of_kind(name, "ScaledObject", "HorizontalPodAutoscaler")
    targets = [f"{each['spec']['scaleTargetRef']['kind']}/{each['spec']['scaleTargetRef']['name']}" for each in scalers]
    assert sorted(targets) == sorted(TARGETS)
    assert len({each["kind"] for each in scalers}) == 1
    for document in documents(name):
        if title(document) in TARGETS:
            assert "replicas" not in document["spec"], title(document)


def test_a_missing_answer_is_a_failure_that_takes_no_worker_away() -> None:
    for spec in scaled_by_keda().values():
        assert spec["fallback"]["behavior"] == "currentReplicasIfHigher"
        assert spec["fallback"]["replicas"] >= spec["minReplicaCount"] >= 1
        [trigger] = spec["triggers"]
        assert trigger["metadata"]["ignoreNullValues"] == "false"
        # Fallbacks exist for averages only. The value is a sum, which grows with the work whatever the replicas are.
        assert trigger["metricType"] == "AverageValue"
        assert not re.search(r"\bor\b|vector|avg|max", trigger["metadata"]["query"])


@pytest.mark.parametrize(("name", "expected"), [("keda", "pdserve"), ("example", "llm")])
def test_queries_read_the_recorded_series_of_this_namespace_and_model(name: str, expected: str) -> None:
    """The example has a namespace and a model of its own."""
    [model] = {service.model[0] for service in services(name)}
    [namespace] = {each["metadata"]["namespace"] for each in documents(name)}
    assert namespace == expected
    scaled = scaled_by_keda(name)
    assert scaled.keys() == SERIES.keys()
    for tier, spec in scaled.items():
        query = spec["triggers"][0]["metadata"]["query"]
        assert query == f'{SERIES[tier]}{{namespace="{namespace}",model_name="{model}"}}'


def test_metrics_of_the_other_autoscalers_are_those_of_the_model() -> None:
    [model] = {service.model[0] for service in services("hpa")}
    for spec in scaled_by_hpa().values():
        assert spec["metrics"][0]["external"]["metric"]["selector"] == {"matchLabels": {"model_name": model}}


def test_no_namespace_and_no_model_is_written_into_an_autoscaler() -> None:
    for path in (K8S / "components").rglob("*.yaml"):
        text = path.read_text(encoding="utf-8")
        if "kind: ScaledObject" in text or "kind: HorizontalPodAutoscaler" in text:
            assert "smollm2" not in text
            assert 'namespace="pdserve"' not in text


def test_the_series_are_recorded() -> None:
    path = MONITORING / "rules/autoscaling.yaml"
    groups = yaml.load(path.read_text(encoding="utf-8"), LOADER)["groups"]
    recorded = {rule["record"] for group in groups for rule in group["rules"] if "record" in rule}
    assert set(SERIES.values()) <= recorded


def test_both_kinds_of_autoscalers_ask_for_the_same() -> None:
    keda, hpa = scaled_by_keda(), scaled_by_hpa()
    assert keda.keys() == hpa.keys() == SERIES.keys()
    for tier, spec in keda.items():
        other = hpa[tier]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == (other["minReplicas"], other["maxReplicas"])
        assert spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == other["behavior"]
        [metric] = other["metrics"]
        target = metric["external"]["target"]
        assert target["type"] == "AverageValue"
        assert _number(target["averageValue"]) == float(spec["triggers"][0]["metadata"]["threshold"])


def _number(quantity: str | int) -> float:
    text = str(quantity)
    return float(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)


def test_scaling_down_is_slower_than_up_and_than_a_drain() -> None:
    [grace_s] = {service.workload.spec["terminationGracePeriodSeconds"] for service in services("hpa")}
    for spec in scaled_by_hpa().values():
        up, down = spec["behavior"]["scaleUp"], spec["behavior"]["scaleDown"]
        assert up["stabilizationWindowSeconds"] < down["stabilizationWindowSeconds"]
        [policy] = down["policies"]
        assert (policy["type"], policy["value"]) == ("Pods", 1)
        assert policy["periodSeconds"] > grace_s


def test_names_fit_into_labels() -> None:
    for spec in scaled_by_keda().values():
        [trigger] = spec["triggers"]
        # KEDA makes the metric's name of these.
        assert len(f"s0-prometheus-{trigger['name']}") <= 63
        assert len(spec["advanced"]["horizontalPodAutoscalerConfig"]["name"]) <= 63


def test_the_adapter_serves_the_metrics_of_the_autoscalers() -> None:
    rules = yaml.load((K8S / "components/hpa/adapter-rules.yaml").read_text(encoding="utf-8"), LOADER)
    served = {rule["name"]["as"]: rule["seriesQuery"] for rule in rules["rules"]["external"]}
    wanted = {spec["metrics"][0]["external"]["metric"]["name"]: SERIES[tier] for tier, spec in scaled_by_hpa().items()}
    assert served == wanted


@pytest.mark.parametrize("tier", SERIES)
def test_an_autoscaler_holds_at_steady_load_grows_at_once_and_shrinks_slowly(tier: str) -> None:
    spec = scaled_by_keda()[tier]
    minimum, maximum, target = (
        spec["minReplicaCount"],
        spec["maxReplicaCount"],
        Autoscaler.from_scaled_object(spec).target,
    )

    def replicas(*values: float | None, start: int = minimum) -> list[int]:
        autoscaler = replace(Autoscaler.from_scaled_object(spec), replicas=start)
        return replay(autoscaler, [(15.0 * number, value) for number, value in enumerate(values)])

    steady = [4 * target * share for share in (0.95, 1.05, 1.0, 0.93, 1.08)] * 40
    assert set(replicas(*steady, start=4)) == {4}
    assert set(replicas(*[None] * 100, start=4)) == {4}
    flood = replicas(*[100 * target] * 60)
    assert flood[1] > minimum
    assert flood[-1] == maximum
    idle = replicas(*[0.0] * 200, start=maximum)
    assert idle[-1] == minimum
    # Five minutes of less, then one pod at a time, with more time in between than a pod has to drain.
    assert idle[: 300 // 15] == [maximum] * (300 // 15)
    changes = [number for number, (one, two) in enumerate(itertools.pairwise(idle)) if one != two]
    assert all(15 * (later - earlier) >= 120 for earlier, later in itertools.pairwise(changes))
    assert all(one - two <= 1 for one, two in itertools.pairwise(idle))
