"""`make test-deploy`: the tests marked `deploy`, which need programs that `make test` does without."""

from __future__ import annotations

import subprocess
import sys

from tests.deploy.engine import why_no_engine

_NO_TESTS = 5
#: For one test with what it prepares; the first one with containers builds the images.
_TIMEOUT_S = 1200


def main(arguments: list[str]) -> int:
    """Runs pytest with these arguments, by default all tests marked `deploy`. Returns the exit status.

    The last line says whether containers were run.
    """
    command = [sys.executable, "-m", "pytest", "-m", "deploy", "--timeout", str(_TIMEOUT_S)]
    command += ["--durations", "15", *(arguments or ["tests"])]
    status = subprocess.run(command, check=False).returncode
    reason = why_no_engine()
    print(f"deploy: skipped ({reason}; what needs no container has run)" if reason else "deploy: run")
    return 0 if status == _NO_TESTS else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
