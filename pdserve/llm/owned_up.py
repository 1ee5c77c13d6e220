"""`pdserve up` for an owner: stops when the process with the id in the first argument has ended, however it did.

    python -m pdserve.llm.owned_up PID MODEL FLAGS...

The owner is watched through a pidfd. PR_SET_PDEATHSIG would fire when the owner's thread ends, and a pipe would stay
open in other processes that the owner has forked.

Source: pidfd_open(2).
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading

from pdserve.cli.__main__ import main as run_command


def main() -> int:
    """Runs the cluster; returns the command's exit code."""
    owner = int(sys.argv[1])
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        return 1
    # The number may be that of another process by now.
    if os.getppid() != owner:
        return 1
    threading.Thread(target=_stop_after, args=(descriptor,), name="owner", daemon=True).start()
    return run_command(["up", *sys.argv[2:]])


def _stop_after(descriptor: int) -> None:
    """Stops this process as Ctrl-C does once the owner has ended."""
    ended = select.poll()
    ended.register(descriptor, select.POLLIN)
    ended.poll()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
