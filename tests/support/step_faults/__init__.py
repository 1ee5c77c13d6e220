"""Requests that end the worker which computes them, by a fault of its own or by a SIGKILL as from outside.

Workers get the faults through `site/sitecustomize.py`, which Python imports when they start.
"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

_VARIABLE = "STEP_FAULTS"
_ROOT = Path(__file__).parents[3]
#: First tokens of prompts that end a worker.
SEGFAULT, SIGKILLED = 31_337, 31_338
#: Workers that all requests with `SIGKILLED` end together.
MAX_KILLS = 5


class StepFaults:
    """The test's side."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "deaths"
        self._file.touch()

    def environment(self) -> dict[str, str]:
        """Variables for the processes of a cluster."""
        inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        paths = [str(Path(__file__).parent / "site"), str(_ROOT), *inherited]
        # What is executed imports it; a fork server has no module of a service behind `-m`.
        executed = {"PDSERVE_UP__FORK_WORKERS": "0"}
        return {_VARIABLE: str(self._file), "PYTHONPATH": os.pathsep.join(paths), **executed}

    def deaths(self, fault: int) -> list[str]:
        """The tiers of the workers that ended so, in order."""
        return _deaths(self._file, fault)


def _deaths(file: Path, fault: int) -> list[str]:
    found = (line.split() for line in file.read_text().splitlines())
    return [tier for number, tier in found if number == str(fault)]


def install(tier: str) -> None:
    """The worker's side: a launch with such a prompt does not return."""
    path = os.environ.get(_VARIABLE)
    if path is None:
        return
    from pdserve.engine.runner import Runner
    from pdserve.engine.step import StepPlan

    launch, file = Runner.launch, Path(path)

    def launch_or_die(self: Runner, plan: StepPlan, *others: object) -> object:
        found = {sequence.tokens[0] for sequence in plan.scheduled()} & {SEGFAULT, SIGKILLED}
        for fault in found:
            if fault == SEGFAULT or len(_deaths(file, fault)) < MAX_KILLS:
                with file.open("a") as deaths:
                    deaths.write(f"{fault} {tier}\n")
                if fault == SIGKILLED:
                    os.kill(os.getpid(), signal.SIGKILL)
                ctypes.string_at(0)
        return launch(self, plan, *others)  # type: ignore[arg-type]

    Runner.launch = launch_or_die  # type: ignore[method-assign,assignment]
