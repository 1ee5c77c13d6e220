"""Starting a process so that it dies with this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from pdserve.cli.supervisor import launch
from pdserve.cli.supervisor.spec import ProcessSpec


class ChildProcess(Protocol):
    """A started process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int:
        """Its id, also that of its session and process group."""

    def wait(self) -> int:
        """Reaps it. Returns the exit status, or minus the signal's number."""

    def kill(self) -> None:
        """Sends SIGKILL."""


#: Starts a process with this environment, and this descriptor as its output. Raises `OSError`.
Start = Callable[[ProcessSpec, Mapping[str, str], int], ChildProcess]


def launch_argv(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` so that it dies with this process."""
    return [sys.executable, "-I", "-S", str(Path(launch.__file__)), str(os.getpid()), *argv]


def execute(spec: ProcessSpec, environment: Mapping[str, str], output: int) -> ChildProcess:
    """Executes the command of a process."""
    return subprocess.Popen(
        launch_argv(spec.argv),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )
