"""Starts a system, waits until it answers, and stops all of its processes in every case."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.peers.environments import PeerUnavailable, last_line
from benchmarks.peers.resources import tree
from benchmarks.peers.systems import System
from pdserve.cli.bench.workload import Target
from pdserve.cli.free_ports import free_port

_READY_TIMEOUT_S = 420.0
_STOP_TIMEOUT_S = 30.0
#: Interval of requests to a server that does not report its readiness.
_POLL_INTERVAL_S = 0.02
_ANSWER_TIMEOUT_S = 60.0
_FIRST_PROMPT = (1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that has answered. `start_s`: seconds from its start to the end of its first answer."""

    target: Target
    pid: int
    start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingServer:
    """The process of a server, from its start on."""

    system: System
    process: subprocess.Popen[bytes]
    base_url: str
    log: Path
    started_at: float

    def wait_ready(self) -> RunningServer:
        """Returns after the first answer. Raises `PeerUnavailable` when the server ends or takes too long."""
        while not (self._is_ready() and self._answers()):
            if self.process.poll() is not None:
                raise PeerUnavailable(f"ended while starting: {last_line(self.log)}")
            if time.perf_counter() - self.started_at > _READY_TIMEOUT_S:
                raise PeerUnavailable(f"not ready after {_READY_TIMEOUT_S:g} s: {last_line(self.log)}")
            time.sleep(_POLL_INTERVAL_S)
        fields = {"temperature": 0, "ignore_eos": True}
        # Some servers close a kept connection just as the next request arrives, so each request opens a new one.
        headers = {"Connection": "close"}
        target = Target(base_url=self.base_url, model=self.system.served_name, fields=fields, headers=headers)
        return RunningServer(target=target, pid=self.process.pid, start_s=time.perf_counter() - self.started_at)

    def _is_ready(self) -> bool:
        """Whether the server reports readiness; pdserve is ready when all its workers are."""
        if not self.system.workers:
            return self._send("/health") is not None
        cluster = json.loads(self._send("/v1/cluster") or "{}")
        return [worker["ready"] for worker in cluster.get("workers", [])] == [True] * self.system.workers

    def _answers(self) -> bool:
        body = {"model": self.system.served_name, "prompt": list(_FIRST_PROMPT), "max_tokens": 1}
        return self._send("/v1/completions", body) is not None

    def _send(self, path: str, body: dict[str, object] | None = None) -> bytes | None:
        """The body of the answer; None without one."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.base_url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as response:
                answer: bytes = response.read()
                return answer
        except (urllib.error.URLError, OSError):
            return None


@contextmanager
def started(system: System, log_dir: Path) -> Iterator[StartingServer]:
    """Starts the system; no process of it is left after the block. Raises `PeerUnavailable`."""
    # Its successor is the port of pdserve for gRPC.
    port = free_port(1)
    log = log_dir / f"{system.key}.log"
    started_at = time.perf_counter()
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                system.arguments(port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **system.environment, "XDG_STATE_HOME": str(log_dir)},
                start_new_session=True,
            )
    except OSError as error:
        raise PeerUnavailable(f"cannot be started: {error}") from error
    try:
        yield StartingServer(
            system=system, process=process, base_url=f"http://127.0.0.1:{port}", log=log, started_at=started_at
        )
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stops it like Ctrl-C; kills the processes that remain after a timeout."""
    processes = tree(process.pid)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):
        # Also reaches processes left behind by a server that died.
        os.killpg(process.pid, signal.SIGTERM)
    left = [child for child in processes[1:] if child.is_running()]
    _, alive = psutil.wait_procs(left, timeout=_STOP_TIMEOUT_S / 6)
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=_STOP_TIMEOUT_S)
