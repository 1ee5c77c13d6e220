"""A real Prometheus that scrapes a cluster, and its HTTP API."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.autoscaling.scenarios import RULES
from tests.support.cluster import free_port
from tests.support.tools import tool

_READY_S = 60.0
_POLL_INTERVAL_S = 0.2

Target = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus, its targets in a file that it watches."""

    base_url: str
    targets_file: Path

    def scrape(self, targets: Sequence[Target]) -> None:
        """Replaces the targets: entries of a file for file_sd."""
        new = self.targets_file.with_suffix(".new")
        new.write_text(json.dumps(targets), encoding="utf-8")
        new.rename(self.targets_file)

    def query(self, expression: str, *, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        """The series of a query as of a Unix time, by default now: labels and value."""
        found = self._get("query", query=expression, **({} if at is None else {"time": at}))["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def value(self, expression: str) -> float | None:
        """The value as KEDA takes it: None without a series or with NaN. More than one series is an error."""
        found = self.query(expression)
        assert len(found) <= 1, f"an autoscaler refuses several series: {found}"
        return found[0][1] if found and not math.isnan(found[0][1]) else None

    def values(self, expression: str, start: float, end: float, step_s: float) -> list[tuple[float, float | None]]:
        """`value` at every step from `start` to `end`, in Unix time."""
        found = self._get("query_range", query=expression, start=start, end=end, step=step_s)["result"]
        assert len(found) <= 1, f"an autoscaler refuses several series: {found}"
        known = {round(at, 3): float(value) for series in found for at, value in series["values"]}
        times = [start + step_s * number for number in range(int((end - start) / step_s) + 1)]
        return [(at, known.get(round(at, 3))) for at in times]

    def exemplars(self, selector: str, start: float, end: float) -> list[dict[str, str]]:
        """Labels of the exemplars that were scraped."""
        data = self._get("query_exemplars", query=selector, start=start, end=end)
        return [exemplar["labels"] for series in data for exemplar in series["exemplars"]]

    def is_ready(self) -> bool:
        """Whether queries are answered."""
        try:
            with urllib.request.urlopen(f"{self.base_url}/-/ready", timeout=5) as response:
                return int(response.status) == 200
        except (urllib.error.URLError, OSError):
            return False

    def _get(self, endpoint: str, **parameters: object) -> Any:
        url = f"{self.base_url}/api/v1/{endpoint}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=30) as response:
            body = json.load(response)
        assert body["status"] == "success", body
        return body["data"]


@contextmanager
def running_prometheus(directory: Path, *, scrape_interval_s: int) -> Iterator[Prometheus]:
    """Prometheus with the recording rules as shipped. Stops it at the end."""
    port = free_port()
    targets = directory / "targets.json"
    targets.write_text("[]", encoding="utf-8")
    config = directory / "prometheus.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": f"{scrape_interval_s}s"},
                "rule_files": [str(RULES)],
                "scrape_configs": [
                    {
                        "job_name": "pdserve",
                        "file_sd_configs": [{"files": [str(targets)], "refresh_interval": "5s"}],
                    }
                ],
            }
        ),
        encoding="utf-8",
    )
    command = [
        str(tool("prometheus")),
        f"--config.file={config}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    log = directory / "prometheus.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            prometheus = Prometheus(f"http://127.0.0.1:{port}", targets)
            deadline = time.monotonic() + _READY_S
            while not prometheus.is_ready():
                ended = process.poll() is not None or time.monotonic() > deadline
                assert not ended, f"Prometheus is not ready:\n{log.read_text(errors='replace')[-2000:]}"
                time.sleep(_POLL_INTERVAL_S)
            yield prometheus
        finally:
            process.terminate()
            process.wait(timeout=30)
