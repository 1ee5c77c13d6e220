"""What a supervisor is asked to run, and what it reports: values only."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pdserve.base.errors import SetupError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process to keep running."""

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    #: Output of all incarnations, appended.
    log_path: Path
    #: Returns once the process serves; for programs that cannot tell by themselves. None: READY=1 through sd_notify.
    probe: Callable[[], Awaitable[None]] | None = None
    #: Seconds from start to ready.
    ready_timeout_s: float = 600.0
    #: Seconds from SIGTERM to SIGKILL.
    stop_grace_s: float = 10.0
    #: Processes of a lower stage have ended before those of a higher one are told to.
    stop_stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How one incarnation ended."""

    #: Exit status, or minus the signal's number, as in `subprocess`.
    code: int
    ran_s: float
    was_ready: bool
    #: What the process said last about why, if it did.
    reason: str

    def describe(self) -> str:
        """`exited with code 1` or `was killed by SIGKILL`."""
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            return f"was killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"was killed by signal {-self.code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A new incarnation runs."""

    spec: ProcessSpec
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChanged:
    """The process said in one line what it does."""

    spec: ProcessSpec
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BecameReady:
    """The process serves."""

    spec: ProcessSpec
    took_s: float
    #: False for the first incarnation.
    is_restart: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Died:
    """The process ended without being asked to, and is started again after `restart_in_s`."""

    spec: ProcessSpec
    exit: Exit
    restart_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """The process was told to drain and end."""

    spec: ProcessSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The process ended after it was told to."""

    spec: ProcessSpec
    exit: Exit
    #: It did not end within its grace and was killed.
    forced: bool = field(default=False)


Event = Started | StatusChanged | BecameReady | Died | Stopping | Stopped


class StartFailed(SetupError):
    """A process ended, or was not ready in time, before it had ever been ready."""
