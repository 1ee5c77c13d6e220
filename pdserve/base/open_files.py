"""Open files of the process. Its limit is raised at the start, and listeners that run out of files fill no log."""

from __future__ import annotations

import asyncio
import errno
import resource
import time
from collections.abc import Callable
from typing import Any

from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Soft limit that a service gives itself, if the hard limit allows: enough for the requests of any router. Nothing here
#: uses select(2), for whose sake systems start processes with 1,024.
_WANTED = 65_536
#: One line in this time stands for all connections that could not be accepted.
_LOG_EVERY_S = 10.0
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
