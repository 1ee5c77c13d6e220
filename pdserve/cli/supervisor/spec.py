"""Values: the processes a supervisor runs, and the events it reports."""

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
    #: Form of the lines that the process writes to it.
    log_format: str = "text"
    #: Whether the fork server, if there is one, has imported what the process needs.
    is_forked: bool = False
    #: Returns once the process serves, for programs that do not report readiness. None: READY=1 through sd_notify.
    probe: Callable[[], Awaitable[None]] | None = None
    #: Seconds from start to ready.
    ready_timeout_s: float = 600.0
    #: Seconds without a sign of life after which it is killed and restarted, once it has given one (`WATCHDOG=1`).
    hang_timeout_s: float = 30.0
    #: Seconds from SIGTERM to SIGKILL.
    stop_grace_s: float = 10.0
    #: Processes of a higher stage get SIGTERM once all of the lower stages have ended.
    stop_stage: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of one incarnation."""

    #: Exit status, or minus the signal's number, as in `subprocess`.
    code: int
    ran_s: float
    #: Seconds from readiness to the end; None: it was never ready.
    served_s: float | None
    #: Last words of the process about the cause; may be empty.
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
class ProcessStarted:
    """A new incarnation runs."""

    spec: ProcessSpec
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusChanged:
    """The process reported its status in one line."""

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
    """The process ended on its own and is started again after `restart_in_s`."""

    spec: ProcessSpec
    exit: Exit
    restart_in_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """The process got SIGTERM: it drains and ends."""

    spec: ProcessSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """The process ended on request."""

    spec: ProcessSpec
    exit: Exit
    #: Whether it exceeded its grace and was killed.
    forced: bool = field(default=False)


ProcessEvent = ProcessStarted | StatusChanged | BecameReady | Died | Stopping | Stopped


class StartFailed(SetupError):
    """A process ended, or was not ready in time, before it had ever been ready."""
