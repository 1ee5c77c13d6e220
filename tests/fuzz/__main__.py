"""`python -m tests.fuzz MINUTES`: damaged files of all kinds in turn, in a child process with limited memory.

A finding is printed with its target and seed, which always make the same file:
`python -m tests.fuzz --again read_gguf 1234`.
"""

from __future__ import annotations

import argparse
import faulthandler
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

from tests.fuzz.files.targets import TARGETS, Seeds, run

#: Address space of the process: what importing torch takes, and what a file may take besides.
_MEMORY_BYTES = 12 << 30
#: Processor time that one file may take.
_FILE_SECONDS = 20.0


def main() -> int:
    """Returns the exit status: 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1000, help="first seed; those below run in make test")
    parser.add_argument("--again", nargs=2, metavar=("TARGET", "SEED"), help="one file, with its traceback")
    arguments = parser.parse_args()
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    with tempfile.TemporaryDirectory() as directory:
        seeds = Seeds(Path(directory))
        if arguments.again:
            run(arguments.again[0], seeds, int(arguments.again[1]))
            return 0
        return _fuzz(seeds, arguments.seed, time.monotonic() + 60 * arguments.minutes)


def _fuzz(seeds: Seeds, seed: int, until: float) -> int:
    counts: Counter[str] = Counter()
    while time.monotonic() < until:
        for name in TARGETS:
            counts[_outcome(name, seeds, seed)] += 1
        seed += 1
    print(f"seeds up to {seed}: " + ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items())))
    return 1 if counts["found"] or counts["slow"] else 0


def _outcome(name: str, seeds: Seeds, seed: int) -> str:
    started_at = time.process_time()
    try:
        outcome = "read" if run(name, seeds, seed) else "refused"
    except KeyboardInterrupt:
        raise
    except BaseException:  # noqa: BLE001 - Panics of libraries in Rust are no `Exception`.
        print(f"FOUND {name} {seed}\n{traceback.format_exc()}", flush=True)
        return "found"
    if time.process_time() - started_at > _FILE_SECONDS:
        print(f"SLOW {name} {seed}", flush=True)
        return "slow"
    return outcome


if __name__ == "__main__":
    sys.exit(main())
