"""Open files of the process. Its limit is raised at the start, and listeners that run out of files fill no log.

Libraries that end the process when they get no file have some kept for them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Soft limit that a service gives itself, if the hard limit allows: enough for the requests of any router. Nothing here
#: uses select(2), for whose sake systems start processes with 1,024.
_WANTED = 65_536
#: One line in this time stands for all connections that could not be accepted.
_LOG_EVERY_S = 10.0
#: Interval at which free files are counted. It is shorter where few are left: enough for opening this many a second.
_COUNT_EVERY_S, _FASTEST_PER_S = 0.1, 40_000
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


def raise_limit() -> None:
    """Raises the soft limit of this process, and of those that it starts. Never lowers it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(_WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class AcceptErrors:
    """An event loop's exception handler for which a listener without a free file is one line in a while.

    asyncio stops accepting for a second then, and calls the handler a hundred times.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at = float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handles an error that no task raises."""
        error = context.get("exception")
        if isinstance(error, (ValueError, OSError)) and "_start_serving" in repr(context.get("handle")):
            return  # A listener was closed before asyncio could have it accept again.
        if not isinstance(error, OSError) or error.errno not in _EXHAUSTED or "socket" not in context:
            loop.default_exception_handler(context)
            return
        now = self._clock()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            log.error("cannot_accept_connections", reason=error.strerror, max_open_files=limit)


class SpareFiles:
    """Files kept for a library that ends the process when it gets none."""

    def __init__(self, *, kept: int = 64, needed: int = 32, clock: Callable[[], float] = time.monotonic) -> None:
        """`kept`: how many, where there are as many. `needed`: those that one call may open."""
        self._wanted = kept
        self._needed = needed
        self._clock = clock
        self._null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._kept: list[int] = []
        self._limit = 0
        #: When free files are counted again.
        self._enough_until = float("-inf")

    def can_open(self) -> bool:
        """Whether the next call may open files. Where too few are free, some of those kept are given up for it."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        now = self._clock()
        if limit == self._limit and now < self._enough_until:
            return True
        self._limit = limit
        self._keep()
        spare = num_free(limit) - self._needed
        self._enough_until = now + min(spare / _FASTEST_PER_S, _COUNT_EVERY_S)
        while spare < 0 and self._kept:
            os.close(self._kept.pop())
            spare += 1
        return spare >= 0

    def close(self) -> None:
        """Keeps none any more. It is not used afterwards."""
        while self._kept:
            os.close(self._kept.pop())
        os.close(self._null)

    def _keep(self) -> None:
        with suppress(OSError):
            while len(self._kept) < self._wanted:
                self._kept.append(os.dup(self._null))


def num_free(limit: int) -> int:
    """Files that this process may still open under this limit; 0 where that cannot be found out for want of one."""
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    try:
        # Some may be above a limit that was lowered. The listing itself has one that is closed again.
        return limit - sum(int(name) < limit for name in os.listdir("/proc/self/fd")) + 1
    except FileNotFoundError:
        return sys.maxsize
    except OSError:
        return 0
