"""Replaces itself with a program that the kernel kills when the parent process dies, even by SIGKILL.

Run as a script, `launch.py PARENT_PID PROGRAM ARGUMENTS...`, not imported. PR_SET_PDEATHSIG survives exec, so a tiny
interpreter sets it and then replaces itself. The alternative, `preexec_fn`, runs Python between fork and exec, which
may deadlock in a process with threads. The signal is tied to the launching thread, so children are started from the
main thread. It reaches only the child; a living supervisor kills the child's own children by process group.

Source: prctl(2), PR_SET_PDEATHSIG.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process's life to its parent's, then executes the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # If the parent died before the line above, the signal never comes.
    if os.getppid() != parent:
        sys.exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"error: Cannot run {program[0]}: {error.strerror}.", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
