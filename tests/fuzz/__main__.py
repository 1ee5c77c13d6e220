"""`python -m tests.fuzz MINUTES`: damaged and forged input of every kind, a process for each area, one after the other.

What breaks something is kept in a directory, and printed with the command that repeats it:
`python -m tests.fuzz --again grpc fuzz-findings/grpc-0123456789ab`. `docs/internals/fuzzing.md` describes the areas.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import io
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from pdserve.base.logs import JsonFormatter, _TextFormatter
from tests.fuzz import area
from tests.fuzz.area import Area, running_inputs

#: Areas in the order in which they run.
AREAS = ("files", "http", "grpc", "internal", "records")
#: The first seed: those below run in make test.
_FIRST_SEED = 1000


def present() -> list[str]:
    """The areas that this tree has."""
    return [name for name in AREAS if importlib.util.find_spec(f"tests.fuzz.{name}") is not None]


def area_of(name: str) -> Area:
    """The area of that name."""
    found: Area = importlib.import_module(f"tests.fuzz.{name}.area").AREA
    return found


def main() -> int:
    """Returns the exit status: 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=1.0)
    parser.add_argument(
        "--areas", type=lambda text: text.split(","), default=present(), help="some of " + ",".join(AREAS)
    )
    parser.add_argument("--seed", type=int, default=_FIRST_SEED, help="first seed; those below 1000 run in make test")
    parser.add_argument("--found", type=Path, default=Path("fuzz-findings"), help="directory for what breaks something")
    parser.add_argument(
        "--again", nargs="+", metavar=("AREA", "INPUT"), help="kept inputs, or a target of files and its seed"
    )
    parser.add_argument("--here", action="store_true", help="run the one area in this process")
    arguments = parser.parse_args()
    if arguments.again:
        _again(*arguments.again)
        return 0
    if arguments.here:
        [name] = arguments.areas
        return _fuzz(name, arguments.seed, 60 * arguments.minutes, arguments.found)
    statuses = [_run(name, arguments) for name in arguments.areas]
    return 1 if any(statuses) else 0


def _run(name: str, arguments: argparse.Namespace) -> int:
    """An area in a process of its own, which may end in any way."""
    minutes = str(arguments.minutes / len(arguments.areas))
    options = ["--here", "--areas", name, "--seed", str(arguments.seed), "--found", str(arguments.found)]
    # grpc logs on its own what strangers send.
    environment = {**os.environ, "GRPC_VERBOSITY": "NONE"}
    command = [sys.executable, "-m", "tests.fuzz", minutes, *options]
    status = subprocess.run(command, env=environment, check=False).returncode
    if status not in (0, 1):
        kept = running_inputs(arguments.found, name)
        print(f"FOUND by {name}: the process ended with status {status}, in the last input of {kept}")
        print(f"Repeat it: python -m tests.fuzz --again {name} {kept}", flush=True)
    return status


class _Formatted(logging.StreamHandler):  # type: ignore[type-arg]
    """Every log line is made, as JSON and as text, and none is shown. A line that cannot be made is a finding."""

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.formatters = (JsonFormatter("fuzz"), _TextFormatter("fuzz"))

    def emit(self, record: logging.LogRecord) -> None:
        """Makes the lines, which have to be one each."""
        for formatter in self.formatters:
            line = formatter.format(record)
            assert record.exc_info or len(line.splitlines()) == 1, f"a log line of several lines: {line!r}"
            line.encode()


def _fuzz(name: str, seed: int, seconds: float, found: Path) -> int:
    until = time.monotonic() + seconds
    faulthandler.enable()
    logging.getLogger().handlers[:] = [_Formatted()]
    logging.getLogger().setLevel(logging.INFO)
    if name == "files":
        report = importlib.import_module("tests.fuzz.files.area").fuzz(first_seed=seed, until=until, found=found)
    else:
        report = area.fuzz(area_of(name), first_seed=seed, until=until, found=found)
    print(report, flush=True)
    return 1 if report.findings else 0


def _again(name: str, *inputs: str) -> None:
    if name == "files":
        importlib.import_module("tests.fuzz.files.area").again(inputs[0], int(inputs[1]))
    else:
        area.again(area_of(name), [Path(path) for path in inputs])


if __name__ == "__main__":
    sys.exit(main())
