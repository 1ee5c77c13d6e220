"""A gate that holds prefill workers in the middle of a prompt, so that a test need not catch them there by speed.

A closed gate is a file. While it exists, a worker computes the first chunk of a prompt and then takes no more steps. It
still answers calls, such as an abort, and reports its load. Workers get the gate through `site/sitecustomize.py`, which
Python imports when they start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_VARIABLE = "PREFILL_GATE"
_ROOT = Path(__file__).parents[3]
#: Seconds between two looks at the file. A worker loses at most that much after the gate opens.
_LOOK_EVERY_S = 0.005


class PrefillGate:
    """The test's side: closes and opens the gate of every prefill worker started with its environment."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "closed"

    def environment(self) -> dict[str, str]:
        """Variables for the processes of a cluster."""
        inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        paths = [str(Path(__file__).parent / "site"), str(_ROOT), *inherited]
        # What is executed imports it; a fork server has no module of a service behind `-m`.
        executed = {"PDSERVE_UP__FORK_WORKERS": "0"}
        return {_VARIABLE: str(self._file), "PYTHONPATH": os.pathsep.join(paths), **executed}

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Close the gate. Open it at the end of the block at the latest."""
        self._file.touch()
        try:
            yield
        finally:
            self.open()

    def open(self) -> None:
        """Let the workers go on."""
        self._file.unlink(missing_ok=True)


def install() -> None:
    """The worker's side: its steps wait for the gate, if it was started with one."""
    path = os.environ.get(_VARIABLE)
    if path is None:
        return
    from pdserve.engine.stepper import Stepper

    take_step = Stepper.step
    file = Path(path)

    def step(self: Stepper, may_go_on: Callable[[], bool]) -> None:
        if file.exists() and self._scheduler.load().num_running:
            self.publish()
            while file.exists() and may_go_on():
                time.sleep(_LOOK_EVERY_S)
            if not may_go_on():
                # The caller serves the calls that came, and returns here.
                return
        take_step(self, may_go_on)

    Stepper.step = step  # type: ignore[method-assign]
