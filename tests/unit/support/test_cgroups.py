"""Noise on purpose: a group of processes that stands still."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.support import cgroups
from tests.support.deadline import DEADLINE_S

#: Ends once it has stood still, in a child that left the session of its parent.
UNTIL_STOPPED = """
import os, time
before = time.monotonic()
while time.monotonic() - before < 0.2:
    before = time.monotonic()
    time.sleep(0.01)
"""


def test_a_frozen_group_stands_still_and_goes_on_with_processes_of_other_sessions() -> None:
    with ExitStack() as stack:
        try:
            members = stack.enter_context(cgroups.frozen(every_s=0.2, for_s=0.4))
        except OSError as error:
            pytest.skip(f"no freezer here: {error}")
        command = cgroups.joining(members, ["setsid", sys.executable, "-c", UNTIL_STOPPED])
        assert subprocess.run(command, check=False, timeout=DEADLINE_S).returncode == 0
