"""`make dashboards`: writes the dashboards as JSON, which Grafana reads."""

from __future__ import annotations

import json
from pathlib import Path

from tests.deploy.dashboards import capacity, cluster, handover, recovery, tiers, worker
from tests.deploy.dashboards.panels import Dashboard

OUTPUT = Path(__file__).parents[3] / "k8s/monitoring/dashboards"
DASHBOARDS = (
    cluster.DASHBOARD,
    tiers.DASHBOARD,
    handover.DASHBOARD,
    recovery.DASHBOARD,
    capacity.DASHBOARD,
    worker.DASHBOARD,
)


def as_text(dashboard: Dashboard) -> str:
    """The content of a dashboard's file."""
    return json.dumps(dashboard.as_json(), indent=2) + "\n"


def main() -> None:
    """Writes all dashboards."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    for dashboard in DASHBOARDS:
        (OUTPUT / f"{dashboard.name}.json").write_text(as_text(dashboard), encoding="utf-8")


if __name__ == "__main__":
    main()
