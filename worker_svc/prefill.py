"""`python -m worker_svc.prefill`: a worker that starts in the prefill tier."""

from __future__ import annotations

from worker_svc.run import run


def main() -> None:
    """Runs the worker until it is stopped by a signal."""
    run("prefill")


if __name__ == "__main__":
    main()
