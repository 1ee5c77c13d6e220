"""Dashboards ask for what is exported, every panel says what it shows, and the JSON is that of its source."""

from __future__ import annotations

import json
import re

import pytest

from tests.deploy.catalog import alerts, all_rules, exported, selectors, unknown_in
from tests.deploy.dashboards.generate import DASHBOARDS, OUTPUT, as_text
from tests.deploy.dashboards.panels import Dashboard

#: Units of Grafana; `suffix:` may name any other.
UNITS = {"short", "s", "bytes", "Bps", "percentunit", "reqps", "cps", "bool_yes_no"}

#: Metrics on no panel and in no rule: shares and details of others, and what belongs to bills and to traces.
UNSEEN = {
    "pdserve_bodies_refused_total",
    "pdserve_kv_event_resyncs_total",
    "pdserve_kv_transfer_blocks_total",
    "pdserve_prefix_index_failures_total",
    "pdserve_prefix_index_gaps_total",
    "pdserve_queued_uncached_tokens",
    "pdserve_request_queue_time_seconds",
    "pdserve_request_records_dropped_total",
    "pdserve_request_success_total",
    "pdserve_spans_exported_total",
    "pdserve_tenant_requests_total",
    "pdserve_tenant_tokens_total",
    "pdserve_texts_refused_total",
    "pdserve_transport_guarded",
    "pdserve_unprepared_requests_total",
    "pdserve_usage_days_dropped_total",
    "pdserve_usage_requests_dropped_total",
    "pdserve_worker_role",
}

each = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: dashboard.name)


def test_the_files_are_those_of_the_sources() -> None:
    """`make dashboards` writes them."""
    assert {path.name for path in OUTPUT.glob("*.json")} == {f"{dashboard.name}.json" for dashboard in DASHBOARDS}
    for dashboard in DASHBOARDS:
        assert (OUTPUT / f"{dashboard.name}.json").read_text(encoding="utf-8") == as_text(dashboard), dashboard.name


@each
def test_queries_ask_for_what_is_exported(dashboard: Dashboard) -> None:
    queries = [query for panel in dashboard.panels for query in panel.queries]
    unknown = {query.expr: unknown_in(_plain(query.promql)) for query in queries}
    assert {expr: found for expr, found in unknown.items() if found} == {}


def test_what_is_exported_is_on_a_panel_or_in_a_rule() -> None:
    """A new metric that nobody would look at is seen here."""
    queries = [_plain(query.promql) for each in DASHBOARDS for panel in each.panels for query in panel.queries]
    rules = [str(rule["expr"]) for rule in all_rules()]
    read = {selector.name for query in (*queries, *rules) for selector in selectors(query)}
    ours = {name for name in exported() if name.startswith("pdserve_") and not name.endswith("_created")}
    assert {_base(name) for name in ours} - {_base(name) for name in read if name} == UNSEEN


def _base(name: str) -> str:
    """A histogram's name without the ending of a sample."""
    return re.sub("_(bucket|sum|count)$", "", name)


def _plain(query: str) -> str:
    """The query with a duration in place of Grafana's variable."""
    return query.replace("$__rate_interval", "1m")


@each
def test_variables_ask_for_what_is_exported(dashboard: Dashboard) -> None:
    queries = [variable["query"] for variable in dashboard.as_json()["templating"]["list"][1:]]
    series = [re.match(r"\w+\((.*?)(?:, \w+)?\)$", query["query"]) for query in queries]
    assert [unknown_in(match[1]) for match in series if match] == [[]] * len(queries)


@each
def test_every_panel_has_a_title_a_unit_and_says_what_to_do(dashboard: Dashboard) -> None:
    titles = [panel.title for panel in dashboard.panels]
    assert len(titles) == len(set(titles))
    for panel in dashboard.panels:
        assert panel.unit in UNITS or panel.unit.startswith("suffix: "), panel.title
        assert panel.description.endswith("."), panel.title
        assert panel.queries
        several = len(panel.queries) > 1
        assert all(query.legend for query in panel.queries) or not several, panel.title


@each
def test_panels_name_alerts_that_exist(dashboard: Dashboard) -> None:
    named = {name for panel in dashboard.panels for name in re.findall(r"Pdserve[A-Z]\w+", panel.description)}
    assert named <= alerts().keys()


@each
def test_panels_do_not_overlap_and_have_different_ids(dashboard: Dashboard) -> None:
    panels = json.loads(as_text(dashboard))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for position in (panel["gridPos"] for panel in panels)
        for x in range(position["x"], position["x"] + position["w"])
        for y in range(position["y"], position["y"] + position["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@each
def test_no_query_leaves_a_placeholder(dashboard: Dashboard) -> None:
    known = {"$model_name", "$namespace", "$instance", "$__rate_interval"}
    for panel in dashboard.panels:
        for query in panel.queries:
            assert set(re.findall(r"\$\w+", query.promql)) <= known, query.promql
