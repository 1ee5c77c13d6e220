"""`python -m tests.unstable`: fails if a test in tests/unstable.toml has passed only when repeated too often."""

from __future__ import annotations

import datetime as dt
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_suffix(".toml")
#: Sightings from which on a test has to be fixed.
LIMIT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """A test that passed only when it was repeated, on one day, as often as `count` says."""

    test: str
    date: dt.date
    symptom: str
    processor: str
    count: int

    def __post_init__(self) -> None:
        """Dates may be written as strings, which is how they are printed."""
        object.__setattr__(self, "date", dt.date.fromisoformat(str(self.date)))


def read(text: str) -> list[Sighting]:
    """The entries of the file. Raises `TypeError` or `ValueError` for one with other fields."""
    return [Sighting(**entry) for entry in tomllib.loads(text)["seen"]]


def too_often(sightings: list[Sighting]) -> dict[str, int]:
    """Tests that were seen `LIMIT` times or more, with the number."""
    counts: Counter[str] = Counter()
    for each in sightings:
        counts[each.test] += each.count
    return {test: count for test, count in counts.items() if count >= LIMIT}


def main() -> int:
    """Returns 1 if a test has to be fixed."""
    found = too_often(read(FILE.read_text(encoding="utf-8")))
    for test, count in found.items():
        print(f"passed only when repeated {count} times: {test}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
