"""`python -m worker_svc.decode`: a worker that starts in the decode tier."""

from __future__ import annotations

from worker_svc.run import run


def main() -> None:
    """Runs the worker until it is stopped by a signal."""
    run("decode")


if __name__ == "__main__":
    main()
