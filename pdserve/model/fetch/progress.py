"""Progress of long jobs (downloads, conversions), reported to a callback that may display it."""

from __future__ import annotations

from typing import Protocol


class ProgressCallback(Protocol):
    """Called on the job's thread, first with `done_bytes` 0 and last with `done_bytes` equal to `total_bytes`."""

    def __call__(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        """`what` names the job in a line for people; `total_bytes` None: unknown."""


def silent(what: str, done_bytes: int, total_bytes: int | None) -> None:
    """Ignores progress."""
