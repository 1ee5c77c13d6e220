"""The `pdserve` command: finds the subcommand and imports only its module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from pdserve import __version__
from pdserve.base.errors import PdserveError

#: Help text of each command, by the name of its module, with a hyphen for an underscore.
COMMANDS = {
    "up": "start a cluster on this machine: router, prefill and decode workers, Redis",
    "chat": "chat with a running cluster in the terminal",
    "run-batch": "run the requests of a file, and go on where an earlier run has ended",
    "status": "show the workers of a running cluster, their load and their health",
    "drain": "take a worker out of service while its requests go on elsewhere, or put it back",
    "rebalance": "move running requests to decode workers that have fewer",
    "role": "move a worker to the other tier while it runs",
    "fetch": "download and convert a model into a directory",
    "secrets": "make the secrets, certificates and first API key of a cluster",
    "key": "make an API key, and show it once",
    "health": "ask a router or worker whether it is ready",
    "doctor": "check this machine and a running cluster, and say what to do about each finding",
    "plan": "compute what a model takes, what fits, and how many workers a load needs",
    "bench": "measure latency and throughput of a server, or the speed of kernels",
    "chaos": "break a cluster of its own while requests run, and check every answer",
    "trace": "show where a request's time went and which decisions were made for it",
}


class _Command(Protocol):
    def main(self, argv: Sequence[str]) -> int:
        """Runs the command; returns the exit code. Raises `PdserveError`, shown as one line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `pdserve ARGUMENTS`; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name, *rest = arguments
    if name in ("-V", "--version", "version"):
        print(f"pdserve {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"error: {name!r} is not a pdserve command. Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        return cast(_Command, importlib.import_module(f"pdserve.cli.{name.replace('-', '_')}")).main(rest)
    except PdserveError as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output (`| head`) has closed the pipe; the interpreter must not try to flush again.
        sys.stdout = None
        return 141
    return 1


def _help() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: pdserve COMMAND [ARGUMENTS]\n\n"
        "Serves large language models with separate prefill and decode workers.\n\n"
        f"{commands}\n\n"
        "`pdserve COMMAND --help` explains a command's arguments; `pdserve --version` prints the version.\n"
        "Start with:  pdserve up"
    )


if __name__ == "__main__":
    sys.exit(main())
