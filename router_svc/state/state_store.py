"""One protocol for all stores of state: records, the events of what runs, and who runs it.

A record is open while a router works on it. That router has claimed it for some seconds, and renews the claim. An open
record without a claim is work that a lost router has left. Only the holder of a claim changes an open record.

A key is the name of a group, a colon, and an id. The group of a record that is listed has all such records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from pdserve.base.errors import TooLarge
from pdserve.observe.metrics import GaugeSource

#: A record, sealed and compressed. Larger ones are refused.
MAX_RECORD_BYTES = 32 << 20
#: Events of one record that are kept.
MAX_EVENT_BYTES = 8 << 20
#: Time for which a claim holds without a renewal.
CLAIM_S = 10.0
#: Time for which events are kept after the last one.
EVENTS_TTL_S = 3600.0
#: Time for which it is known that a record was deleted for good.
DELETED_TTL_S = 3600.0


class Stage(Enum):
    """How far a record is."""

    GONE = 0
    ENDED = 1
    CLAIMED = 2
    #: Open, and nobody has claimed it.
    LEFT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class EventBatch:
    """Events with consecutive numbers."""

    first: int
    events: Sequence[bytes]

    @property
    def last(self) -> int:
        """The number of the last one."""
        return self.first + len(self.events) - 1

    def behind(self, number: int) -> EventBatch:
        """The events with larger numbers."""
        skipped = max(0, number + 1 - self.first)
        return EventBatch(first=self.first + skipped, events=self.events[skipped:])


class StateStore(Protocol):
    """Records by key. Every method raises `StoreError` while the store is away or full."""

    def gauges(self) -> Sequence[GaugeSource]:
        """What is known of the store while `run` runs, for metrics."""

    async def run(self) -> None:
        """What the store itself has to do, until cancelled."""

    async def require_writable(self) -> None:
        """Raises `StoreError` when nothing could be stored now."""

    async def create(
        self, key: str, record: bytes, *, holder: str = "", is_listed: bool = False, is_again: bool = False
    ) -> bool:
        """Stores a record. With a `holder` it is open, and claimed. Raises `TooLarge`.

        False: there is an open record of this key, or with a `holder` any; or with `is_again`, it was deleted for good.
        """

    async def read(self, key: str) -> bytes | None:
        """The record; None: there is none."""

    async def stage(self, key: str) -> Stage:
        """How far the record is, without reading it."""

    async def update(self, key: str, record: bytes, holder: str, *, is_open: bool) -> bool:
        """Changes an open record, and ends it unless it stays open. False: it is gone, or claimed by another holder.

        Raises `TooLarge`.
        """

    async def delete(self, key: str, *, for_good: bool = False) -> bool:
        """Deletes a record with its events. False: there is none. `for_good`: `create` again fails for a time."""

    async def claim(self, key: str, holder: str) -> bool:
        """Claims an open record, or renews the claim. False: it is gone or not open, or another one has it."""

    async def release(self, key: str, holder: str) -> None:
        """Gives a claim back. The record stays open."""

    async def unclaimed(self) -> list[str]:
        """Keys of open records without a claim."""

    async def listed(self, group: str) -> list[str]:
        """Keys of the group's records that are listed, in their order as texts."""

    async def append(self, key: str, batch: EventBatch) -> None:
        """Adds events of a record, unless it is gone. Those that are there already are left as they are."""

    async def events(self, key: str, after: int, *, wait_s: float) -> list[EventBatch]:
        """Events with larger numbers than `after`, in order. Waits for one for at most this time."""


def require_size(record: bytes) -> None:
    """Raises `TooLarge` for a record that no store takes."""
    if len(record) > MAX_RECORD_BYTES:
        raise TooLarge(
            f"The record has {len(record)} bytes, more than may be stored ({MAX_RECORD_BYTES}). Send or ask for less, "
            "or send `store: false`."
        )


def group_of(key: str) -> str:
    """The name of the group of a key."""
    return key.rpartition(":")[0]
