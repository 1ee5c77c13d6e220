"""A run of the tests ends: whatever still runs when all is reported is shown and ended."""

from __future__ import annotations

import faulthandler

from hypothesis import settings

from tests.support import devices

# No test is about how long it takes: a machine that is busy would decide.
settings.register_profile("pdserve", deadline=None)
settings.load_profile("pdserve")

#: Known before any test module is imported: some libraries import Triton, which is when it decides to interpret.
DEVICE = devices.DEVICE
_TIME_TO_EXIT_S = 60


def pytest_unconfigure() -> None:
    """A thread that never ends would keep the interpreter from exiting."""
    faulthandler.dump_traceback_later(_TIME_TO_EXIT_S, exit=True)
