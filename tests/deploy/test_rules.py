"""Alert rules name what pdserve exports, have a page and tests, and say what is wrong in words and numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.catalog import RULES, RUNBOOKS, alerts, all_rules, exported, unknown_in

TESTS = Path(__file__).parent / "rules"


@pytest.mark.parametrize("path", sorted(RULES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_metric_and_label_in_the_rules_is_exported(path: Path) -> None:
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    unknown = {
        rule.get("alert", rule.get("record")): unknown_in(rule["expr"]) for group in groups for rule in group["rules"]
    }
    assert {name: found for name, found in unknown.items() if found} == {}


def test_a_renamed_metric_a_wrong_label_and_a_wrong_value_are_seen() -> None:
    assert unknown_in("rate(pdserve_num_preemptions[5m]) > 0") == ["pdserve_num_preemptions"]
    assert unknown_in('pdserve_kv_blocks{subject="redis"}') == ["pdserve_kv_blocks{subject}"]
    assert unknown_in('pdserve_kv_transfers_total{outcome="lost"}') == ["pdserve_kv_transfers_total{outcome='lost'}"]
    assert unknown_in('pdserve_inter_token_latency_seconds_bucket{le="0.6"}') != []
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        unknown_in("sum by (pdserve_kv_blocks")


@pytest.mark.parametrize("name", alerts())
def test_an_alert_has_a_severity_a_page_and_words(name: str) -> None:
    rule = alerts()[name]
    labels, annotations = rule["labels"], rule["annotations"]
    assert isinstance(labels, dict)
    assert isinstance(annotations, dict)
    assert labels["severity"] in ("critical", "warning", "info")
    assert annotations["runbook_url"] == f"https://github.com/pdserve/pdserve/blob/main/docs/runbooks/{name}.md"
    assert (RUNBOOKS / f"{name}.md").is_file()
    assert {"summary", "description"} < annotations.keys()
    assert len(annotations["summary"]) < 120
    # The label that says which model or pod it is, so that two alerts of one name can be distinguished.
    assert re.search(r"\$labels\.(model_name|pod)", annotations["summary"])


def test_every_page_belongs_to_an_alert() -> None:
    assert {path.name for path in RUNBOOKS.glob("*.md")} == {"README.md", *(f"{name}.md" for name in alerts())}


def test_a_ratio_has_a_denominator_above_zero() -> None:
    """0/0 is NaN, which no comparison holds for, but which panels and notifications would show."""
    divisions = [
        str(rule["expr"]) for rule in all_rules() if "alert" in rule and re.search(r"\s/\s", str(rule["expr"]))
    ]
    assert divisions
    for expression in divisions:
        denominator = re.split(r"\s/\s", expression)[-1]
        assert "> 0)" in denominator, expression


def test_no_alert_uses_a_quantile() -> None:
    """Beyond the last bucket a quantile is that bucket: shares of requests beyond a bound are used instead."""
    assert [name for name, rule in alerts().items() if "histogram_quantile" in str(rule["expr"])] == []


def test_the_share_beyond_a_bound_uses_a_bucket_that_exists() -> None:
    bounds = exported()["pdserve_time_to_first_token_seconds_bucket"].values["le"]
    assert {"5.0", "+Inf"} <= bounds


def _evaluations() -> list[tuple[str, bool]]:
    """The alerts that promtool's tests evaluate, and whether each is expected to fire."""
    found = []
    for path in sorted(TESTS.glob("*.yaml")):
        for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]:
            for check in test.get("promql_expr_test", ()):
                name = re.fullmatch(r'ALERTS\{alertname="(\w+)", alertstate="firing"\}', check["expr"])
                if name is not None:
                    found.append((name[1], bool(check["exp_samples"])))
    return found


@pytest.mark.parametrize("fires", [True, False], ids=["firing", "not_firing"])
def test_every_alert_is_tested(fires: bool) -> None:
    evaluated = {name for name, firing in _evaluations() if firing is fires}
    assert evaluated == alerts().keys()
