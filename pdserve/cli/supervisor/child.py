"""One incarnation of a process: started in a session of its own, watched through a pidfd, reaped exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

from pdserve.cli.supervisor import launch
from pdserve.cli.supervisor.notify_socket import NotifySocket
from pdserve.cli.supervisor.spec import Exit, ProcessSpec

_LOG_TAIL_BYTES = 16 * 1024


def launch_argv(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` so that it dies with this process."""
    return [sys.executable, "-I", "-S", str(Path(launch.__file__)), str(os.getpid()), *argv]


class Child:
    """A running process. Its own session keeps the terminal's Ctrl-C away from it: only the supervisor stops it.

    Output goes straight into the log file, not through us, so that nothing we do or fail to do can block the process.
    """

    def __init__(self, spec: ProcessSpec, on_status: Callable[[str], None]) -> None:
        """Starts the process. Raises `OSError` when the system cannot."""
        self._spec = spec
        self._on_status = on_status
        self._loop = asyncio.get_running_loop()
        self._started_at = time.monotonic()
        #: Set by READY=1.
        self.said_ready = asyncio.Event()
        #: Set once the process is gone and reaped; `code` is there then.
        self.ended = asyncio.Event()
        self.code: int | None = None
        #: Whether it served at some time.
        self.was_ready = False
        self._status = ""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as undo, spec.log_path.open("ab", buffering=0) as log:
            with contextlib.suppress(OSError):  # a full disk is no reason not to run
                log.write(f"--- {spec.name} started {datetime.now().astimezone().isoformat('T', 'seconds')}\n".encode())
            self._log_start = log.tell()
            self._notify = NotifySocket(self._on_message)
            undo.callback(self._notify.close)
            self._process = subprocess.Popen(
                launch_argv(spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**spec.environment, "NOTIFY_SOCKET": self._notify.address},
                start_new_session=True,
            )
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
        """Seconds since it was started."""
        return time.monotonic() - self._started_at

    def terminate(self) -> None:
        """Asks it to drain and end. Nothing when it has ended."""
        if not self.ended.is_set():
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and everything in its process group at once. Nothing when it has ended."""
        if not self.ended.is_set():
            os.killpg(self.pid, signal.SIGKILL)

    def exit(self) -> Exit:
        """How it ended. Only after `ended`."""
        assert self.code is not None
        return Exit(code=self.code, ran_s=self.ran_s, was_ready=self.was_ready, reason=self._reason())

    @property
    def status(self) -> str:
        """What it last said it does."""
        return self._status

    def _on_message(self, variables: Mapping[str, str]) -> None:
        if "STATUS" in variables:
            self._status = variables["STATUS"]
            self._on_status(self._status)
        if variables.get("READY") == "1":
            self.said_ready.set()

    def _reap(self) -> None:
        self._loop.remove_reader(self._pidfd)
        # Its last words were sent before it died, but the loop may not have read them yet.
        self._notify.drain()
        self._notify.close()
        # As long as the leader is a zombie its number is not given to another group: what it left behind can be ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.code = self._process.wait()
        os.close(self._pidfd)
        self.ended.set()

    def _reason(self) -> str:
        """The error it reported, else the last `error:` line of its output, else the last line; may be empty."""
        if self._status.startswith("error:"):
            return self._status
        lines = [line for line in tail_lines(self._spec.log_path, self._log_start) if line.strip()]
        errors = [line for line in lines if line.startswith("error:")]
        return (errors or lines or [""])[-1].strip()


def tail_lines(path: Path, start: int) -> list[str]:
    """The last lines of a log file from byte `start` on; none when it cannot be read."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(min(start, end), end - _LOG_TAIL_BYTES))
            return log.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
