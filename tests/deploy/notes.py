"""What tests measured, shown at the end of a run."""

from __future__ import annotations

NOTES: list[str] = []


def note(text: str) -> None:
    """Adds a line to the end of the run."""
    NOTES.append(text)
