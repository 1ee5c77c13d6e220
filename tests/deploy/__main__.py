"""`make test-deploy`: the tests marked `deploy`, which need programs that `make test` does without."""

from __future__ import annotations

import subprocess
import sys

_NO_TESTS = 5


def main(arguments: list[str]) -> int:
    """Runs pytest with these arguments, by default all tests marked `deploy`. Returns the exit status."""
    command = [sys.executable, "-m", "pytest", "-m", "deploy", "--timeout", "900", *(arguments or ["tests"])]
    status = subprocess.run(command, check=False).returncode
    if status == _NO_TESTS:
        print("deploy: no test")
        return 0
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
