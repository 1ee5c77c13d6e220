"""The compose stack of CPU workers, run for real and observed from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from pdserve.cli.router_client import get_model
from pdserve.cli.status import ClusterStatus, WorkerStatus
from tests.arch.documents import ROOT
from tests.deploy.engine import compose_command, run
from tests.deploy.load import Load

READY_S = 300.0
SETTLE_S = 120.0
_POLL_INTERVAL_S = 0.2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stack:
    """A compose project with the CPU stack, at a port of its own."""

    port: int
    admin_port: int
    variables: Mapping[str, str]
    #: Compose files besides ours.
    overrides: tuple[Path, ...] = ()
    #: How many workers a tier should have, for `scale`.
    replicas: dict[str, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})

    @property
    def base_url(self) -> str:
        """The router's address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def api_key(self) -> str:
        """The first API key, as a user finds it."""
        [key] = re.findall(r"shown this once: (\S+)$", self.logs("secrets"), re.MULTILINE)
        return key

    def load(self, *, max_tokens: int) -> Load:
        """Clients of this stack."""
        return Load(self.port, max_tokens, self.api_key)

    # Compose
    def compose(self, *arguments: str) -> str:
        """Runs a command of Compose; returns what it printed."""
        files = [word for path in (ROOT / "compose/compose.yaml", *self.overrides) for word in ("-f", str(path))]
        return run(*compose_command(), *files, *arguments, environment=self.variables)

    def up(self) -> None:
        """Starts everything and returns when both tiers are ready."""
        self.compose("up", "-d", "--no-build")
        self.wait_tiers(timeout_s=READY_S)

    def scale(self, tier: str, number: int) -> None:
        """Gives a tier this many workers; returns when Compose has started new ones, or old ones have drained."""
        self.replicas[tier] = number
        scales = [word for name, count in self.replicas.items() for word in ("--scale", f"{name}={count}")]
        self.compose("up", "-d", "--no-build", "--no-recreate", *scales)

    def down(self) -> None:
        """Removes containers, networks and volumes."""
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "20")

    def containers(self, service: str, *, stopped: bool = False) -> list[dict[str, Any]]:
        """The facts of a service's containers, as the engine reports them."""
        filters = [f"label=com.docker.compose.project={self.variables['COMPOSE_PROJECT_NAME']}"]
        filters.append(f"label=com.docker.compose.service={service}")
        flags = [word for text in filters for word in ("--filter", text)]
        ids = run("docker", "ps", "-q", *(["-a"] if stopped else []), *flags).split()
        return json.loads(run("docker", "inspect", *ids)) if ids else []

    def logs(self, *services: str) -> str:
        """What services have logged."""
        return self.compose("logs", "--no-color", *services)

    def execute(self, service: str, *command: str) -> str:
        """What a command prints in a service's first container, with the first API key in its environment."""
        return run(
            "docker", "exec", "-e", f"PDSERVE_API_KEY={self.api_key}", self.containers(service)[0]["Id"], *command
        )

    def crash(self, service: str) -> None:
        """Kills the process of a service's first container, as the kernel does when memory runs out."""
        os.kill(self.containers(service)[0]["State"]["Pid"], signal.SIGKILL)

    # Observations
    def view(self) -> ClusterStatus:
        """The data of `pdserve status`."""
        return get_model(f"http://127.0.0.1:{self.admin_port}", "/v1/cluster", ClusterStatus, self.api_key)

    def workers(self, tier: str) -> list[WorkerStatus]:
        """The ready workers of a tier."""
        return [worker for worker in self.view().workers if worker.tier == tier and worker.ready]

    def samples(self, tier: str, name: str) -> list[tuple[Mapping[str, str], float]]:
        """Labels and values of a metric of all workers of a tier."""
        found = []
        for worker in self.workers(tier):
            with urllib.request.urlopen(f"http://{worker.http_address}/metrics", timeout=10) as response:
                text = response.read().decode()
            for family in text_string_to_metric_families(text):
                found += [(sample.labels, sample.value) for sample in family.samples if sample.name == name]
        return found

    # Waiting
    def until(self, condition: Callable[[], T], what: str, *, timeout_s: float = SETTLE_S) -> T:
        """Returns the first true value of `condition`; fails after `timeout_s` with `what` in the message."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                value = condition()
            except Exception as error:  # noqa: BLE001  a stack that starts refuses in many ways
                value, problem = None, str(error)
            else:
                problem = ""
            if value:
                return value
            assert time.monotonic() < deadline, f"did not happen within {timeout_s:g} s: {what} {problem}"
            time.sleep(_POLL_INTERVAL_S)

    def wait_tiers(self, *, timeout_s: float = SETTLE_S) -> None:
        """Returns once the tiers have as many ready workers as they should."""

        def are_ready() -> bool:
            return {tier: len(self.workers(tier)) for tier in self.replicas} == self.replicas

        self.until(are_ready, f"ready workers: {self.replicas}", timeout_s=timeout_s)
