"""Metadata that cannot be read is counted, not shown."""

from __future__ import annotations

import logging

import pytest

from pdserve.net.grpc_log import MetadataFilter


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("grpc._cython.cygrpc", logging.ERROR, "x", 1, text, (b"sk-\xff",), None)


def test_one_line_in_ten_seconds_stands_for_all_unreadable_metadata(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    kept = MetadataFilter(clock=lambda: now)
    with caplog.at_level(logging.INFO):
        assert not any(kept.filter(record("Invalid encoding on %s")) for _ in range(100))
        now = 11.0
        assert not kept.filter(record("Invalid encoding on %s"))
    counts = [entry.fields["count"] for entry in caplog.records]  # type: ignore[attr-defined]
    assert counts == [1, 100]


def test_other_lines_of_grpc_stay() -> None:
    assert MetadataFilter().filter(record("Unexpected [%s]"))
