"""Durations in the log: of a part of a start, and since the process began."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from pdserve.base.logs import get_logger
from pdserve.base.timing import process_age_s, timed


def test_an_event_has_the_seconds_of_its_block_and_what_the_block_adds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with timed(get_logger("test"), "read", device="cuda:0") as fields:
        fields["bytes"] = 7
    [record] = caplog.records
    found = record.__dict__["fields"]
    assert (record.message, found["device"], found["bytes"]) == ("read", "cuda:0", 7)
    assert 0 <= found["seconds"] < 10


def test_a_block_that_fails_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with pytest.raises(ValueError, match="broken"), timed(get_logger("test"), "read"):
        raise ValueError("broken")
    assert not caplog.records


def test_the_age_of_a_process_counts_from_its_own_start() -> None:
    """Fails where it counts from the start of the machine, or of the process that forked it."""
    code = """
import os
from pdserve.base.timing import process_age_s

print(process_age_s(), flush=True)
if pid := os.fork():
    os.waitpid(pid, 0)
print(process_age_s(), flush=True)
"""
    ages = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    before_s, forked_s, after_s = map(float, ages.split())
    assert forked_s >= 0
    # The kernel counts in steps of 10 ms.
    assert before_s + forked_s <= after_s + 0.02
    assert after_s <= process_age_s()
