"""What every test has: no deadline of Hypothesis, a choice of event loop, and a run that ends."""

from __future__ import annotations

import asyncio
import atexit
import faulthandler
import gc
import os
from collections.abc import Callable, Generator, Mapping
from typing import Any

import pytest
from hypothesis import settings

from tests.support import devices, outcomes, progress, schedule
from tests.support.virtual_time import AdvancedTimeLoop, VirtualTimeLoop

# No test is about how long it takes: a busy machine would decide its outcome. Nor is a run about luck: what passed for
# one commit passes for it again, and new examples are the nightly's (`PDSERVE_TEST_SEEDS=random`).
settings.register_profile(
    "pdserve", deadline=None, derandomize=os.environ.get("PDSERVE_TEST_SEEDS") != "random", print_blob=True
)
settings.load_profile("pdserve")

#: Known before any test module is imported: some libraries import Triton, which is when it decides to interpret.
DEVICE = devices.DEVICE
_TIME_TO_EXIT_S = 60


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--outcomes FILE`."""
    outcomes.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Failures are shown at once, and outcomes written where they are asked for."""
    progress.register(config)
    outcomes.register(config)
    if hasattr(config, "workerinput"):
        # The last handler to run: to take thousands of modules and tests apart takes three seconds of each process.
        atexit.register(os._exit, 0)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without the garbage collector, which would look through all modules and tests again and again.

    They stay until the end, so later collections need not look at them either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest tests come first."""
    schedule.arrange(config, items)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> schedule.GroupScheduling:
    """Tests that share a cluster stay together."""
    return schedule.GroupScheduling(config, log)


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests marked `virtual_time` or `advanced_time` run on such a clock, all others on the real one."""
    del config
    if item.get_closest_marker("virtual_time"):
        return {"virtual": VirtualTimeLoop}
    if item.get_closest_marker("advanced_time"):
        return {"advanced": AdvancedTimeLoop}
    return {"real": asyncio.new_event_loop}


def pytest_unconfigure() -> None:
    """A thread that never ends would keep the interpreter from exiting: its stack is shown and the process ended."""
    # At the very end, else pytest's last collections look at everything, and not at all in a process that ends by
    # `os._exit`. Triton's library would report all of its objects as leaked.
    atexit.register(gc.unfreeze)
    faulthandler.dump_traceback_later(_TIME_TO_EXIT_S, exit=True)
