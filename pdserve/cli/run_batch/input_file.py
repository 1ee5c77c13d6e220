"""Reads the requests of a batch from a file, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pdserve.base.batch_lines import BatchLine, parse_line
from pdserve.base.errors import RequestError, SetupError


def check_input(path: Path) -> set[str]:
    """The custom ids of all requests. Raises `SetupError` for a file with any line that is wrong: nothing was sent."""
    custom_ids: set[str] = set()
    for number, line in _numbered(path):
        if line.custom_id in custom_ids:
            raise SetupError(
                f"{path}, line {number}: custom_id {line.custom_id[:100]!r} is that of an earlier line. Change it."
            )
        custom_ids.add(line.custom_id)
    return custom_ids


def read_lines(path: Path) -> Iterator[BatchLine]:
    """All requests in order. Raises `SetupError`."""
    return (line for _, line in _numbered(path))


def _numbered(path: Path) -> Iterator[tuple[int, BatchLine]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    yield number, parse_line(line)
                except RequestError as error:
                    raise SetupError(f"{path}, line {number}: {error}") from None
    except OSError as error:
        raise SetupError(f"Cannot read {path}: {error.strerror}. Check --input-file.") from error
