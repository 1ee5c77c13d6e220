"""The decision records that a router keeps in memory."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from router_svc.records.record import Record


class RecentRecords:
    """The records of the latest requests, running or finished."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._records: OrderedDict[str, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        """Keeps a record, and drops the oldest one beyond the capacity."""
        self._records.pop(record.request_id, None)
        self._records[record.request_id] = record
        if len(self._records) > self._capacity:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> Record | None:
        """The record, or None when it is no longer kept."""
        return self._records.get(request_id)

    def newest(self, limit: int | None = None) -> list[Record]:
        """At most `limit` records, the latest request first; None: all."""
        return list(islice(reversed(self._records.values()), limit))
