"""A process that ends by a fault of its own reports it before it ends; one that is killed does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.cpu import native

pytestmark = pytest.mark.skipif(native.load() is None, reason="the C++ kernels are not built")

#: Fails in a thread while the event loop runs. The report is a file: whoever finds it there knows.
PROCESS = """
import asyncio, ctypes, os, signal, sys, threading
from pathlib import Path
from pdserve.worker.serve.fatal_signals import reporting_fatal_signals

FAULTS = {
    "segfault with the interpreter's lock": lambda: ctypes.string_at(0),
    "segfault without the lock": lambda: ctypes.CDLL(None).strlen(None),
    "abort without the lock": lambda: ctypes.CDLL(None).abort(),
    "abort with the lock": os.abort,
    "killed with SIGSEGV": lambda: print("ready", flush=True),
    "killed with SIGABRT": lambda: print("ready", flush=True),
}

async def main() -> None:
    async def note() -> None:
        await asyncio.to_thread(lambda: None)  # As for Redis, which answers later: the loop has to go on.
        Path(sys.argv[2]).touch()

    async with reporting_fatal_signals(note):
        threading.Thread(target=FAULTS[sys.argv[1]], daemon=True).start()
        await asyncio.sleep(60)

asyncio.run(main())
"""


def _run(fault: str, report: Path) -> int:
    process = subprocess.Popen(
        [sys.executable, "-c", PROCESS, fault, str(report)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    if fault.startswith("killed"):
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, getattr(signal, fault.removeprefix("killed with ")))
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        ("segfault with the interpreter's lock", signal.SIGSEGV),
        ("segfault without the lock", signal.SIGSEGV),
        ("abort without the lock", signal.SIGABRT),
        ("abort with the lock", signal.SIGABRT),
    ],
)
def test_a_fault_is_reported_before_the_process_ends_by_it(tmp_path: Path, fault: str, number: signal.Signals) -> None:
    report = tmp_path / "report"
    assert _run(fault, report) == -number
    assert report.exists()


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_the_same_signal_from_outside_is_not_reported(tmp_path: Path, number: signal.Signals) -> None:
    report = tmp_path / "report"
    assert _run(f"killed with {number.name}", report) == -number
    assert not report.exists()
