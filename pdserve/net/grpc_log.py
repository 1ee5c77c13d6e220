"""Keeps metadata that is no UTF-8 out of the log: grpc would log it, it may be a key, and anybody can send it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: Logger of grpc, and the start of the line that repeats what was sent.
_LOGGER, _LINE = "grpc._cython.cygrpc", "Invalid encoding"
#: One line in this time stands for all metadata that cannot be read.
_LOG_EVERY_S = 10.0


class MetadataFilter(logging.Filter):
    """Replaces grpc's lines about unreadable metadata by one line with a count, so that a flood fills no log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._unlogged = 0
        self._logged_at = float("-inf")

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether grpc's own line is logged."""
        if not str(record.msg).startswith(_LINE):
            return True
        self._unlogged += 1
        now = self._clock()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            log.info("grpc_metadata_unreadable", count=self._unlogged)
            self._unlogged = 0
        return False


_FILTER = MetadataFilter()


def keep_metadata_out_of_the_log() -> None:
    """Adds the filter to grpc's logger, for this process. Further calls are harmless."""
    logging.getLogger(_LOGGER).addFilter(_FILTER)
