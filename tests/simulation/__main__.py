"""`python -m tests.simulation`: runs episodes, each in a process of its own, and prints a line of JSON for each."""

from __future__ import annotations

import argparse
import os
import sys

from tests.simulation.mutations import MUTATIONS
from tests.simulation.run import run_all


def main() -> int:
    """The exit status: 1 if anything was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="requests over all episodes")
    parser.add_argument("--faults", type=int, default=100, help="faults over all episodes")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first episode; later ones count up")
    parser.add_argument("--episode", type=int, default=250, help="requests of one episode")
    parser.add_argument(
        "--replay", type=int, default=0, help="then runs one of so many requests twice, which must agree"
    )
    parser.add_argument(
        "--calm", type=int, default=0, help="requests of one more episode, without faults, which clients end early"
    )
    parser.add_argument(
        "--must-find", default="", metavar="NAMES", help="then a small episode for each of these mutations, which fails"
    )
    parser.add_argument("--trace", metavar="FILE", help="writes what happened; with one episode")
    parser.add_argument(
        "--mutation", choices=sorted(MUTATIONS), help="changes the product; ends with the first finding"
    )
    arguments = parser.parse_args()
    return run_all(arguments)


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # Sets of strings have the same order in each run.
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main())
