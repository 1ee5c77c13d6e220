"""The longest callback of an event loop, in the loop's own processor time.

Other processes and threads do not lengthen that.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import pytest

#: Bound of one callback, in seconds.
LIMIT_S = 0.020
#: Runs of which the shortest counts.
_RUNS = 8


@dataclass
class Longest:
    """The longest callback so far."""

    seconds: float = 0.0
    callback: str = "none"

    def reset(self) -> None:
        """Starts again."""
        self.seconds, self.callback = 0.0, "none"


@contextlib.contextmanager
def watched_callbacks() -> Iterator[Longest]:
    """Measures every callback of this thread's event loop. The garbage collector does not run meanwhile."""
    longest = Longest()
    run: Callable[[asyncio.Handle], None] = asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        shown = repr(handle)
        start = time.thread_time()
        run(handle)
        seconds = time.thread_time() - start
        if seconds > longest.seconds:
            longest.seconds, longest.callback = seconds, shown

    # A collection of the whole heap of the tests would be measured, too. The router exempts what it has at its start.
    gc.collect()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(asyncio.Handle, "_run", measured)
            yield longest
    finally:
        gc.enable()


async def longest_callback(run: Callable[[], Awaitable[object]]) -> Longest:
    """The longest callback of a run, in the shortest of some runs, which end with the first one within the limit.

    A cold cache, a page fault or what another process does to a shared core may lengthen one run. What the work itself
    costs is in each.
    """
    best: Longest | None = None
    for _ in range(_RUNS):
        with watched_callbacks() as longest:
            await run()
        best = longest if best is None or longest.seconds < best.seconds else best
        if best.seconds < LIMIT_S:
            break
    assert best is not None
    return best
