"""Becomes another program that the kernel kills when the process that launched it dies, even by SIGKILL.

Run as a script, `launch.py PARENT_PID PROGRAM ARGUMENTS...`, not imported: PR_SET_PDEATHSIG survives exec, so a tiny
interpreter sets it and then replaces itself. The alternative, `preexec_fn`, runs Python between fork and exec, which
may deadlock in a process with threads. The signal is tied to the launching thread, so children are started from the
main thread. It reaches the child only, not what the child started; those a supervisor that lives ends by process group.

Source: prctl(2), PR_SET_PDEATHSIG.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties our life to the parent's, then turns into the program."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The parent may have died before the line above; then the signal never comes.
    if os.getppid() != parent:
        sys.exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"error: Cannot run {program[0]}: {error.strerror}.", file=sys.stderr)
        sys.exit(127)


if __name__ == "__main__":
    main()
