"""Dashboards as values, and their form as Grafana's JSON.

Grafana's own builder (`grafana-foundation-sdk`) would replace half of this file, and its releases follow Grafana's, so
that dashboards would change with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

#: What `$model` in a query stands for: the series of the chosen model. Outside of Kubernetes `namespace` is empty.
MODEL = 'model_name="$model_name", namespace=~"$namespace"'
#: What `$worker` stands for: the series of one process, those of Prometheus' own collectors included.
WORKER = 'instance="$instance"'

_GRID_WIDTH = 24
_HEIGHTS = {"stat": 4, "timeseries": 8, "table": 6}
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

Kind = Literal["timeseries", "stat", "table"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query and the name of its series, in which `{{label}}` is the value of a label."""

    expr: str
    legend: str = ""

    @property
    def promql(self) -> str:
        """The query as Grafana sends it, apart from the dashboard's variables."""
        return self.expr.replace("$model,", f"{MODEL},").replace("$model}", f"{MODEL}}}").replace("$worker", WORKER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel. `description` says what to do when it looks bad. `unit` is one of Grafana's."""

    title: str
    unit: str
    description: str
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    width: int = 8
    #: Values are stacked upon each other: as they are, or as shares of their sum.
    stack: Literal["none", "normal", "percent"] = "none"
    #: Value from which on a stat is red.
    red_from: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under a common heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard; `name` is that of its file."""

    name: str
    title: str
    description: str
    rows: tuple[Row, ...]
    #: Whether it shows one process, chosen by the variable `instance`.
    of_one_worker: bool = False

    @property
    def panels(self) -> list[Panel]:
        """All panels."""
        return [panel for row in self.rows for panel in row.panels]

    def as_json(self) -> dict[str, Any]:
        """The dashboard in Grafana's format."""
        return {
            "uid": f"pdserve-{self.name}",
            "title": self.title,
            "description": self.description,
            "tags": ["pdserve"],
            "schemaVersion": 39,
            "editable": True,
            "refresh": "10s",
            "time": {"from": "now-1h", "to": "now"},
            "timezone": "browser",
            "links": [_LINKS],
            "templating": {"list": _variables(self.of_one_worker)},
            "annotations": {"list": [_ALERTS]},
            "panels": _placed(self.rows),
        }


def quantiles(metric: str, labels: str = "$model") -> tuple[Query, ...]:
    """Median, 95th and 99th percentile of a histogram."""
    return tuple(
        Query(
            expr=f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{{{labels}}}[$__rate_interval])))",
            legend=f"p{share * 100:g}",
        )
        for share in (0.5, 0.95, 0.99)
    )


_LINKS = {
    "type": "dashboards",
    "title": "pdserve",
    "tags": ["pdserve"],
    "asDropdown": True,
    "includeVars": True,
    "keepTime": True,
}
_ALERTS = {
    "name": "Alerts",
    "datasource": _SOURCE,
    "enable": True,
    "iconColor": "red",
    "expr": f'ALERTS{{alertname=~"Pdserve.+", alertstate="firing", {MODEL}}}',
    "titleFormat": "{{alertname}}",
}


def _variables(of_one_worker: bool) -> list[dict[str, Any]]:
    variables = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        _variable("namespace", "Namespace", "label_values(pdserve_ready, namespace)")
        | {"includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}},
        _variable("model_name", "Model", 'label_values(pdserve_ready{namespace=~"$namespace"}, model_name)'),
    ]
    if of_one_worker:
        # The values are instances, the texts workers' ids.
        query = f"query_result(pdserve_worker_info{{{MODEL}}})"
        regex = '/instance="(?<value>[^"]+)".*worker_id="(?<text>[^"]+)"/'
        variables.append(_variable("instance", "Worker", query) | {"regex": regex})
    return variables


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
    }


def _placed(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The panels from left to right and from top to bottom, each row below its heading."""
    placed: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        position = {"h": 1, "w": _GRID_WIDTH, "x": 0, "y": y}
        placed.append({"id": len(placed) + 1, "type": "row", "title": row.title, "gridPos": position, "panels": []})
        y, x, height = y + 1, 0, 0
        for panel in row.panels:
            if x + panel.width > _GRID_WIDTH:
                y, x, height = y + height, 0, 0
            position = {"h": _HEIGHTS[panel.kind], "w": panel.width, "x": x, "y": y}
            placed.append(_panel(panel, len(placed) + 1, position))
            x, height = x + panel.width, max(height, position["h"])
        y += height
    return placed


def _panel(panel: Panel, number: int, position: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "custom": _style(panel)}
    if panel.red_from is not None:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": panel.red_from}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": position,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _OPTIONS[panel.kind],
        "targets": [_target(panel, index, query) for index, query in enumerate(panel.queries)],
        **({"transformations": _TABLE} if panel.kind == "table" else {}),
    }


def _style(panel: Panel) -> dict[str, Any]:
    if panel.kind != "timeseries":
        return {}
    return {
        "fillOpacity": 60 if panel.stack != "none" else 5,
        "lineWidth": 1,
        "showPoints": "never",
        "stacking": {"mode": panel.stack},
    }


def _target(panel: Panel, index: int, query: Query) -> dict[str, Any]:
    is_table = panel.kind == "table"
    return {
        "refId": chr(ord("A") + index),
        "datasource": _SOURCE,
        "expr": query.promql,
        "legendFormat": query.legend or "__auto",
        "format": "table" if is_table else "time_series",
        "instant": is_table,
        "range": not is_table,
        "exemplar": panel.kind == "timeseries" and "_bucket" in query.expr,
    }


_OPTIONS: dict[str, dict[str, Any]] = {
    "timeseries": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    "stat": {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value", "graphMode": "area"},
    "table": {"showHeader": True},
}
#: Columns that say nothing in a table of present values.
_TABLE = [
    {"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True, "job": True}}}
]
