"""`make test-noise`: commands on a machine that other work keeps busy, or that stands still for seconds.

`python -m tests.noise busy frozen` runs `make test` beside two busy loops of the same weight, and then frozen for three
seconds once a minute. A command behind `--` is run instead, `--times` times under each condition.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.support import cgroups

_PAUSE_S, _EVERY_S = 3.0, 60.0
#: All of it has the weight of the busy loops.
_DEFAULT = [sys.executable, "-m", "tests.run", "--niceness", "0"]


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    """As many processes that compute, until the block ends."""
    loop = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(loop) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_busy(command: Sequence[str]) -> int:
    """The exit status beside a busy loop for each core."""
    with busy_loops(len(os.sched_getaffinity(0))):
        return subprocess.run(command, check=False).returncode


def run_frozen(command: Sequence[str]) -> int:
    """The exit status of a command that stands still again and again, with all of its processes."""
    with cgroups.frozen(every_s=_EVERY_S, for_s=_PAUSE_S) as members:
        return subprocess.run(cgroups.joining(members, command), check=False).returncode


CONDITIONS = {"busy": run_busy, "frozen": run_frozen}


def main() -> int:
    """Runs the command under each condition. Returns 1 if it failed once."""
    parser = argparse.ArgumentParser(prog="python -m tests.noise", description=__doc__)
    parser.add_argument("conditions", nargs="*", metavar="CONDITION", help=f"default: {' '.join(CONDITIONS)}")
    parser.add_argument("--times", type=int, default=1, help="runs under each condition")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    arguments, command = parser.parse_args(words[:end]), words[end + 1 :] or _DEFAULT
    if unknown := set(arguments.conditions) - set(CONDITIONS):
        parser.error(f"Unknown conditions: {', '.join(sorted(unknown))}. Choose from: {', '.join(CONDITIONS)}.")
    results = []
    for name in arguments.conditions or list(CONDITIONS):
        for number in range(arguments.times):
            started_at = time.monotonic()
            status = CONDITIONS[name](command)
            outcome = "failed" if status else "passed"
            results.append(f"{name:8} {number + 1} {outcome}, {time.monotonic() - started_at:.0f} s")
            print(results[-1], flush=True)
    print("", *results, sep="\n")
    return int(any(" failed, " in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
