"""Starts a real cluster with `pdserve up`, and observes it from outside as an operator would."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.error import HTTPError, URLError

import psutil
from prometheus_client.parser import text_string_to_metric_families

from pdserve.cli import free_ports
from pdserve.cli.private_redis import find_redis_server
from pdserve.cli.router_client import get_model
from pdserve.cli.status import ClusterStatus, WorkerStatus
from tests.support.deadline import DEADLINE_S
from tests.support.lazily import anthropic, ollama, openai

MODEL = "smollm2-135m-instruct"
READY_S = 180.0
SETTLE_S = DEADLINE_S
#: Interval of polling for states that send no notification.
_POLL_INTERVAL_S = 0.05

T = TypeVar("T")


def free_port() -> int:
    """A free port whose two successors are free too."""
    return free_ports.free_port(1, 2)


@dataclass(frozen=True, slots=True)
class Footprint:
    """System resources of a process."""

    fds: int
    threads: int
    children: int


class Metrics:
    """The metrics that a process has at this moment."""

    def __init__(self, address: str) -> None:
        self._address = address
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            text = response.read().decode()
        self._families = {family.name: family for family in text_string_to_metric_families(text)}

    def value(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels; 0 without samples."""
        family = self._families.get(name.removesuffix("_total"))
        assert family is not None, f"{self._address} has no metric {name}"
        return sum(s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items())


class Cluster:
    """A running `pdserve up`."""

    def __init__(self, process: subprocess.Popen[str], port: int, log_dir: Path) -> None:
        self.process = process
        self.port = port
        self.log_dir = log_dir
        self.base_url = f"http://127.0.0.1:{port}"
        self.grpc_address = f"127.0.0.1:{port + 1}"
        #: Output of `pdserve up`.
        self.lines: list[str] = []
        self.ready: queue.SimpleQueue[bool] = queue.SimpleQueue()

    # Clients
    def client(self, **options: object) -> openai.OpenAI:
        """The real client, without its own retries."""
        return openai.OpenAI(base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, timeout=100, **options)  # type: ignore[arg-type]

    def anthropic_client(self) -> anthropic.AsyncAnthropic:
        """Anthropic's client. The caller closes it."""
        return anthropic.AsyncAnthropic(base_url=self.base_url, api_key="none", max_retries=0, timeout=120)

    def ollama_client(self) -> ollama.AsyncClient:
        """Ollama's client. The caller closes it."""
        return ollama.AsyncClient(host=self.base_url, timeout=120)

    def async_client(self) -> openai.AsyncOpenAI:
        """Like `client`, for concurrent requests."""
        return openai.AsyncOpenAI(base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, timeout=100)

    # Observations
    def view(self) -> ClusterStatus:
        """The data of `pdserve status`."""
        return get_model(self.base_url, "/v1/cluster", ClusterStatus)

    def workers(self, tier: str) -> list[WorkerStatus]:
        """The ready workers of a tier."""
        return [worker for worker in self.view().workers if worker.tier == tier and worker.ready]

    def metric(self, address: str, name: str, **labels: str) -> float:
        """Sum of a metric's samples with these labels, from one process; 0 without samples."""
        return Metrics(address).value(name, **labels)

    def worker_metric(self, tier: str, name: str, **labels: str) -> float:
        """Sum over all workers of a tier."""
        return sum(self.metric(worker.http_address, name, **labels) for worker in self.workers(tier))

    # Processes
    def processes(self) -> dict[str, psutil.Process]:
        """The service processes by name: router, prefill-0, decode-0, ..."""
        found = {}
        for child in psutil.Process(self.process.pid).children(recursive=True):
            try:
                command = child.cmdline()
            except psutil.Error:
                continue
            for module in ("router_svc", "prefill_svc", "decode_svc", "worker_svc.prefill", "worker_svc.decode"):
                if module in command:
                    ids = [word.removeprefix("--worker-id=") for word in command if word.startswith("--worker-id=")]
                    found[ids[0] if ids else "router"] = child
            if any(find_redis_server().name in word for word in command[:1]):
                found["redis"] = child
        return found

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> psutil.Process:
        """Sends a signal to one service's process."""
        process = self.processes()[name]
        process.send_signal(number)
        return process

    def footprint(self) -> dict[str, Footprint]:
        """Resources of each process, by name."""
        return {
            name: Footprint(process.num_fds(), process.num_threads(), len(process.children(recursive=True)))
            for name, process in self.processes().items()
        }

    # Waiting
    def until(self, condition: Callable[[], T], what: str, *, timeout_s: float = SETTLE_S) -> T:
        """Returns the first true value of `condition`; fails after `timeout_s` with `what` in the message."""
        deadline = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            assert self.process.poll() is None, f"pdserve up ended: {self.lines[-5:]}"
            assert time.monotonic() < deadline, f"did not happen within {timeout_s:g} s: {what}; {self.describe()}"
            time.sleep(_POLL_INTERVAL_S)

    async def until_async(self, condition: Callable[[], T], what: str, *, timeout_s: float = SETTLE_S) -> T:
        """Like `until`, without blocking the event loop."""
        return await asyncio.to_thread(self.until, condition, what, timeout_s=timeout_s)

    def is_idle(self) -> bool:
        """Whether no request runs, waits or holds a block on any tier, as the router also reports."""
        view = self.view()
        return (
            view.router.running == view.router.queued == 0
            and all(self._is_idle(worker) for worker in view.workers if worker.ready)
            and any(worker.ready for worker in view.workers)
        )

    def _is_idle(self, worker: WorkerStatus) -> bool:
        # The router's view counts, too, because it decides where the next prompt goes.
        if not worker.running == worker.waiting == worker.queued_tokens == 0:
            return False
        try:
            value = Metrics(worker.http_address).value
        except HTTPError:
            raise
        except (URLError, ConnectionError):  # It was killed a moment ago, and its record still says that it is ready.
            return False
        return (
            value("pdserve_kv_blocks_free") == value("pdserve_kv_blocks")
            and value("pdserve_kv_transfers_active") == 0
            and value("pdserve_num_requests_running") == value("pdserve_num_requests_waiting") == 0
        )

    def wait_idle(self, *, timeout_s: float = SETTLE_S) -> None:
        """Returns once all blocks, leases and requests are released; fails after `timeout_s`."""
        self.until(self.is_idle, "all blocks, leases and requests are released", timeout_s=timeout_s)

    def wait_tiers(self, *, prefill: int, decode: int, timeout_s: float = 2 * SETTLE_S) -> None:
        """Returns once exactly these numbers of workers are ready."""
        self.until(
            lambda: (len(self.workers("prefill")), len(self.workers("decode"))) == (prefill, decode),
            f"{prefill} prefill and {decode} decode workers ready",
            timeout_s=timeout_s,
        )

    def describe(self) -> str:
        """State of the cluster, for the message of a failing test."""
        try:
            return str(self.view())
        except Exception as error:  # noqa: BLE001 - the message of another failure must not be lost
            return f"the router does not answer: {error}"

    def logs(self) -> str:
        """End of every log file, for the message of a failing test."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.log_dir.glob("*.log"))
        )


@contextmanager
def running_cluster(tmp_path: Path, *flags: str, model: str = MODEL, **environment: str) -> Iterator[Cluster]:
    """A ready cluster with these flags. Stops it by Ctrl-C at the end and checks that no process is left.

    `model`: name or directory. `environment`: variables in addition to those of this process.
    """
    port = free_port()
    log_dir = tmp_path / "logs"
    command = [sys.executable, "-m", "pdserve.cli", "up", model, "--port", str(port), "--log-dir", str(log_dir), *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, **environment},
    )
    cluster = Cluster(process, port, log_dir)
    reader = threading.Thread(target=_read_lines, args=(cluster,), name="pdserve-up-output")
    reader.start()
    try:
        try:
            is_ready = cluster.ready.get(timeout=READY_S)
        except queue.Empty:
            is_ready = False
        assert is_ready, f"pdserve up is not ready: {cluster.lines}\n{cluster.logs()}"
        yield cluster
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0, cluster.lines
        left = [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert not left, f"processes outlived pdserve up: {left}"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


_READY = re.compile(r"^Ready after ")


def _read_lines(cluster: Cluster) -> None:
    assert cluster.process.stdout is not None
    for line in cluster.process.stdout:
        cluster.lines.append(line.rstrip())
        if _READY.match(line):
            cluster.ready.put(True)
    cluster.ready.put(False)
