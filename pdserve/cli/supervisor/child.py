"""One incarnation of a process: it gets its own session, is watched through a pidfd and reaped exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from pdserve.cli.supervisor.notify_socket import NotifySocket
from pdserve.cli.supervisor.spec import Exit, ProcessSpec
from pdserve.cli.supervisor.start import Start, execute

_LOG_TAIL_BYTES = 16 * 1024


class Child:
    """A running process. It has its own session, so that the terminal's Ctrl-C does not reach it.

    Its output goes straight into the log file, not through this process, which therefore cannot block it.
    """

    def __init__(self, spec: ProcessSpec, on_status: Callable[[str], None], start: Start = execute) -> None:
        """Starts the process. Raises `OSError` when the system cannot."""
        self._spec = spec
        self._on_status = on_status
        self._loop = asyncio.get_running_loop()
        self._started_at = time.monotonic()
        #: Set by READY=1.
        self.said_ready = asyncio.Event()
        #: Set by WATCHDOG=1.
        self._said_alive = asyncio.Event()
        self._alive_at = 0.0
        #: Set once the process has been reaped; `code` is set by then.
        self.ended = asyncio.Event()
        self.code: int | None = None
        self._ready_at: float | None = None
        self._status = ""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo, spec.log_path.open("ab", buffering=0) as log:
            with contextlib.suppress(OSError):  # A full disk does not keep the process from running.
                log.write(first_line(spec).encode())
            self._log_start = log.tell()
            self._notify = NotifySocket(self._on_message)
            undo.callback(self._notify.close)
            environment = {**spec.environment, "NOTIFY_SOCKET": self._notify.address}
            self._process = start(spec, environment, log.fileno())
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self._pidfd = os.pidfd_open(self._process.pid)
            undo.pop_all()
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """The process's id, also that of its session and process group."""
        return self._process.pid

    @property
    def ran_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_at

    def became_ready(self) -> None:
        """Notes that it serves from now on."""
        self._ready_at = time.monotonic()

    def terminate(self) -> None:
        """Sends SIGTERM: the process drains and ends. Does nothing when it has ended."""
        if not self.ended.is_set():
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to its process group. Does nothing when it has ended."""
        if not self.ended.is_set():
            os.killpg(self.pid, signal.SIGKILL)

    def exit(self) -> Exit:
        """Exit status and its reason. Call it only after `ended`."""
        assert self.code is not None
        served_s = None if self._ready_at is None else time.monotonic() - self._ready_at
        return Exit(code=self.code, ran_s=self.ran_s, served_s=served_s, reason=self._reason())

    @property
    def status(self) -> str:
        """The status it last reported."""
        return self._status

    async def silent(self, limit_s: float) -> None:
        """Returns once the process has given no sign of life for `limit_s`. Never for one that gives none."""
        await self._said_alive.wait()
        while (left_s := self._alive_at + limit_s - self._loop.time()) > 0:
            await asyncio.sleep(left_s)
            # This process may have been stopped itself: what came meanwhile is read before it is judged.
            self._notify.drain()

    def _on_message(self, variables: Mapping[str, str]) -> None:
        if "STATUS" in variables:
            self._status = variables["STATUS"]
            self._on_status(self._status)
        if variables.get("WATCHDOG") == "1":
            self._alive_at = self._loop.time()
            self._said_alive.set()
        if variables.get("READY") == "1":
            self.said_ready.set()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # Its last messages were sent before it died, but the loop may not have read them yet.
        self._notify.drain()
        self._notify.close()
        # While the leader is a zombie, no other group gets its number: processes it left behind can be killed safely.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.code = self._process.wait()
        os.close(self._pidfd)
        self.ended.set()

    def _reason(self) -> str:
        """The reported error, else the last `error:` line of its output, else the last line; may be empty."""
        if self._status.startswith("error:"):
            return self._status
        lines = [line for line in tail_lines(self._spec.log_path, self._log_start) if line.strip()]
        errors = [line for line in lines if line.startswith("error:")]
        return (errors or lines or [""])[-1].strip()


def first_line(spec: ProcessSpec) -> str:
    """The line that separates an incarnation's output from that of the one before."""
    now = datetime.now().astimezone().isoformat("T", "seconds")
    if spec.log_format != "json":
        return f"--- {spec.name} started {now}\n"
    line = {"time": now, "level": "info", "process": spec.name, "logger": __name__, "event": "process_started"}
    return json.dumps(line) + "\n"


def tail_lines(path: Path, start: int) -> list[str]:
    """The last lines of a log file from byte `start` on; none when it cannot be read."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            # A file that is shorter than it was has been rotated.
            log.seek(max(start if start <= end else 0, end - _LOG_TAIL_BYTES))
            return log.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
