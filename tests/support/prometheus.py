"""A real Prometheus that scrapes a cluster of a test, and its API."""

from __future__ import annotations

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.cluster import free_port
from tests.support.tools import tool

#: Interval of scrapes and of the evaluation of rules.
INTERVAL = "1s"
_START_S = 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One series of an instant query and its value."""

    labels: dict[str, str]
    value: float


class Prometheus:
    """A running Prometheus. The targets can be replaced while it runs."""

    def __init__(self, directory: Path, port: int) -> None:
        self._targets = directory / "targets.json"
        self._url = f"http://127.0.0.1:{port}"

    def set_targets(self, addresses: Sequence[str]) -> None:
        """Scrapes these, each `host:port`, from the next refresh on."""
        new = self._targets.with_suffix(".new")
        new.write_text(json.dumps([{"targets": list(addresses)}]), encoding="utf-8")
        new.rename(self._targets)

    def query(self, promql: str) -> list[Sample]:
        """The present value of a query. Samples that are not a number are left out."""
        result = self.get("/api/v1/query", query=promql)["result"]
        samples = [Sample(series["metric"], float(series["value"][1])) for series in result]
        return [sample for sample in samples if not math.isnan(sample.value)]

    def alerts(self) -> dict[str, dict[str, Any]]:
        """The pending and firing alerts by name; of several with one name, any."""
        return {alert["labels"]["alertname"]: alert for alert in self.get("/api/v1/alerts")["alerts"]}

    def rules(self) -> list[dict[str, Any]]:
        """All rules with their state of health."""
        return [rule for group in self.get("/api/v1/rules")["groups"] for rule in group["rules"]]

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the API. An error of the API fails the test with its text."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error

    def is_ready(self) -> bool:
        """Whether it answers queries."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                return True
        except OSError:
            return False


@contextmanager
def running_prometheus(directory: Path, *, targets: Sequence[str], rules: Sequence[Path]) -> Iterator[Prometheus]:
    """Prometheus with these targets and rule files, its data in `directory`. Skips the test where it is missing."""
    program = tool("prometheus")
    port = free_port()
    prometheus = Prometheus(directory, port)
    prometheus.set_targets(targets)
    config = {
        "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": [
            {"job_name": "pdserve", "file_sd_configs": [{"files": [str(directory / "targets.json")]}]},
        ],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [
        program,
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
        "--log.level=warn",
    ]
    log_path = directory / "prometheus.log"
    with log_path.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            _wait_ready(prometheus, process, log_path)
            yield prometheus
        finally:
            process.terminate()


def _wait_ready(prometheus: Prometheus, process: subprocess.Popen[bytes], log_path: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not prometheus.is_ready():
        assert process.poll() is None, log_path.read_text(encoding="utf-8")
        assert time.monotonic() < deadline, log_path.read_text(encoding="utf-8")
        time.sleep(0.1)  # It sends no notification.
