"""What the lists of a decision record have. An endless request does not fill them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from pdserve.base.ids import Epoch, WorkerId

T = TypeVar("T")

#: Entries of one kind that are kept.
MAX_ENTRIES = 64


class Entries(list[T]):
    """The first and the last entries of one kind, half of `MAX_ENTRIES` each. Only `append` adds some."""

    def __init__(self) -> None:
        super().__init__()
        #: How many there were.
        self.total = 0

    def append(self, entry: T) -> None:
        """Adds the latest entry."""
        if len(self) == MAX_ENTRIES:
            del self[MAX_ENTRIES // 2]
        super().append(entry)
        self.total += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The choice of a worker."""

    at: float
    attempt: int
    tier: str
    worker: WorkerId
    epoch: Epoch
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A retry, or a fallback to something that was not planned."""

    at: float
    attempt: int
    reason: str
    worker: WorkerId | None
    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedChunk:
    """Progress of a prefill worker."""

    at: float
    computed_tokens: int
