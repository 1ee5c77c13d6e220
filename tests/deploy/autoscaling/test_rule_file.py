"""The recording rules as a file: what can be seen without Prometheus."""

from __future__ import annotations

import re

import yaml

from tests.arch.documents import read
from tests.deploy.autoscaling.scenarios import BACKLOG, DEMAND, RULES, STREAMS

[GROUP] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
EXPRESSIONS = {rule["record"]: rule["expr"] for rule in GROUP["rules"]}


def test_the_records_that_autoscalers_read_are_there_and_are_evaluated_as_often_as_autoscalers_look() -> None:
    assert {BACKLOG, DEMAND, STREAMS} <= EXPRESSIONS.keys()
    assert GROUP["interval"] == "15s"


def test_no_outage_looks_like_an_idle_cluster() -> None:
    for expression in EXPRESSIONS.values():
        assert not re.search(r"\b(vector|absent|scalar)\(", expression)


def test_a_record_has_one_series_per_model_and_namespace() -> None:
    for record in (BACKLOG, DEMAND, STREAMS):
        expression = EXPRESSIONS[record]
        assert set(re.findall(r"\b(?:by|on|without|ignoring)\b \(([^)]*)\)", expression)) == {"namespace, model_name"}
        assert not re.search(r"\b(sum|avg|max|min|count)\s*\(", expression)


def test_a_denominator_cannot_be_zero() -> None:
    for expression in EXPRESSIONS.values():
        for denominator in re.split(r"\s/\s", expression)[1:]:
            assert re.search(r"clamp_min\(|> 0\)", denominator), expression


def test_a_record_uses_only_metrics_that_are_documented_and_records_before_it() -> None:
    known = set(re.findall(r"^\| `(pdserve_\w+)`", read("docs/operations/metrics.md"), re.MULTILINE))
    for record, expression in EXPRESSIONS.items():
        used = set(re.findall(r"pdserve[_:][\w:]*\w", expression))
        assert used <= known, (record, used - known)
        known.add(record)
