"""Starts a system, waits until it answers, and stops all of it again, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import socket
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
from benchmarks.peers.machine import tree
from benchmarks.peers.systems import System
from pdserve.cli.bench.workload import Target

_READY_TIMEOUT_S = 420.0
_STOP_TIMEOUT_S = 30.0
#: Between two questions to a server that does not say by itself that it is ready.
_ASK_EVERY_S = 0.02
_ANSWER_TIMEOUT_S = 60.0
_FIRST_PROMPT = (1000, 1001, 1002, 1003, 1004, 1005, 1006, 1007)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that has answered. `start_s`: from its start to the end of its first answer."""

    target: Target
    pid: int
    start_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A server's process, from its first moment on."""

    system: System
    process: subprocess.Popen[bytes]
    base_url: str
    log: Path
    began_at: float

    def wait_ready(self) -> RunningServer:
        """Returns with its first answer. Raises `PeerUnavailable` when it ends or takes too long."""
        while not (self._is_ready() and self._answers()):
            if self.process.poll() is not None:
                raise PeerUnavailable(f"ended while starting: {last_line(self.log)}")
            if time.perf_counter() - self.began_at > _READY_TIMEOUT_S:
                raise PeerUnavailable(f"not ready after {_READY_TIMEOUT_S:g} s: {last_line(self.log)}")
            time.sleep(_ASK_EVERY_S)
        fields = {"temperature": 0, "ignore_eos": True}
        # Some servers close a kept connection at the moment the next request comes: everyone gets a new one each time.
        headers = {"Connection": "close"}
        target = Target(base_url=self.base_url, model=self.system.served_name, fields=fields, headers=headers)
        return RunningServer(target=target, pid=self.process.pid, start_s=time.perf_counter() - self.began_at)

    def _is_ready(self) -> bool:
        """Whether it says so itself; pdserve when all of its workers are there."""
        if not self.system.workers:
            return self._ask("/health") is not None
        cluster = json.loads(self._ask("/v1/cluster") or "{}")
        return [worker["ready"] for worker in cluster.get("workers", [])] == [True] * self.system.workers

    def _answers(self) -> bool:
        body = {"model": self.system.served_name, "prompt": list(_FIRST_PROMPT), "max_tokens": 1}
        return self._ask("/v1/completions", body) is not None

    def _ask(self, path: str, body: dict[str, object] | None = None) -> bytes | None:
        """The answer, or None as long as there is none."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        question = urllib.request.Request(self.base_url + path, data, headers)
        try:
            with urllib.request.urlopen(question, timeout=_ANSWER_TIMEOUT_S) as response:
                answer: bytes = response.read()
                return answer
        except (urllib.error.URLError, OSError):
            return None


@contextmanager
def started(system: System, log_dir: Path) -> Iterator[Started]:
    """The system, starting; at the end of the block no process of it is left. Raises `PeerUnavailable`."""
    port = _free_port()
    log = log_dir / f"{system.key}.log"
    began_at = time.perf_counter()
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
        yield Started(system=system, process=process, base_url=f"http://127.0.0.1:{port}", log=log, began_at=began_at)
    finally:
        _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; what is left after a while is killed."""
    everyone = tree(process.pid)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):
        # Also finds what a server that died by itself left behind.
        os.killpg(process.pid, signal.SIGTERM)
    left = [child for child in everyone[1:] if child.is_running()]
    _, alive = psutil.wait_procs(left, timeout=_STOP_TIMEOUT_S / 6)
    for child in alive:
        child.kill()
    psutil.wait_procs(alive, timeout=_STOP_TIMEOUT_S)


def _free_port() -> int:
    """A port nobody listens on at this moment, and neither on the next one, which pdserve takes for gRPC."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port
