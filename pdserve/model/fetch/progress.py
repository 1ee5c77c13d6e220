"""How long jobs (downloads, conversions) say where they are; whoever has a screen shows it."""

from __future__ import annotations

from typing import Protocol


class ProgressCallback(Protocol):
    """Called from the thread that does the job, first with done = 0 and last with done = total."""

    def __call__(self, what: str, done_bytes: int, total_bytes: int | None) -> None:
        """`what` is a line for people and names the job; `total_bytes` None: not known."""


def silent(what: str, done_bytes: int, total_bytes: int | None) -> None:
    """Shows nothing."""
