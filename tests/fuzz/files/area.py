"""Fuzzing of files: damaged files of all kinds in turn, in a process with limited memory.

A seed always makes the same file: `python -m tests.fuzz --again files read_gguf 1234`.
"""

from __future__ import annotations

import faulthandler
import resource
import tempfile
import time
import traceback
from pathlib import Path

from tests.fuzz.area import Report
from tests.fuzz.files.targets import TARGETS, Seeds, run

#: Address space of the process: what importing torch takes, and what a file may take besides.
_MEMORY_BYTES = 12 << 30
#: Processor time that one file may take.
_FILE_SECONDS = 20.0


def fuzz(*, first_seed: int, until: float, found: Path) -> Report:
    """Reads damaged files until the time on the monotonic clock."""
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    report = Report("files", first_seed, first_seed)
    with tempfile.TemporaryDirectory() as directory:
        seeds = Seeds(Path(directory))
        while time.monotonic() < until:
            for name in TARGETS:
                report.outcomes[_outcome(name, seeds, report, found)] += 1
            report.next_seed += 1
    return report


def again(target: str, seed: int) -> None:
    """One file, with its traceback."""
    with tempfile.TemporaryDirectory() as directory:
        print("read" if run(target, Seeds(Path(directory)), seed) else "refused")


def _outcome(name: str, seeds: Seeds, report: Report, found: Path) -> str:
    started_at, seed = time.process_time(), report.next_seed
    try:
        outcome = "read" if run(name, seeds, seed) else "refused"
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - Panics of libraries in Rust are no `Exception`.
        return _found(name, traceback.format_exc(), seeds, report, found)
    if (seconds := time.process_time() - started_at) > _FILE_SECONDS:
        return _found(name, f"It took {seconds:.0f} s.\n", seeds, report, found)
    return outcome


def _found(name: str, why: str, seeds: Seeds, report: Report, found: Path) -> str:
    """Keeps the damaged model."""
    kept = found / f"files-{name}-{report.next_seed}"
    if seeds.scratch.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        seeds.scratch.rename(kept)
    report.findings.append(str(kept))
    print(f"FOUND by files: {name}, kept in {kept}\n{why}", flush=True)
    print(f"Repeat it: python -m tests.fuzz --again files {name} {report.next_seed}", flush=True)
    return "found"
