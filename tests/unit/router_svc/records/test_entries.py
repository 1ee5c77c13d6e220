"""Lists of a record that an endless request cannot fill."""

from __future__ import annotations

from router_svc.records.entries import MAX_ENTRIES, Entries


def test_the_first_and_the_last_entries_are_kept_and_all_are_counted() -> None:
    entries = Entries[int]()
    for number in range(1000):
        entries.append(number)
    half = MAX_ENTRIES // 2
    assert entries == [*range(half), *range(1000 - half, 1000)]
    assert entries.total == 1000
