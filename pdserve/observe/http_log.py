"""What aiohttp's server reports of connections that speak no proper HTTP, without what they sent.

Its own log lines repeat it. After a wrong `Content-Length` that is the rest of a prompt, and with a control character
in a header it may be a key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from pdserve.base.logs import get_logger

log = get_logger(__name__)

#: One line in this time stands for all requests that cannot be read.
_LOG_EVERY_S = 10.0
#: The second one is a body that cannot be decoded, and that no handler has read.
_FAULTS_OF_CLIENTS = (HttpProcessingError, RequestPayloadError)


class ServerLog(logging.Logger):
    """The logger of one HTTP server. Only the name of an error in the protocol is logged, and a flood fills no log."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(__name__)
        self._clock = clock
        self._unlogged = 0
        self._logged_at = float("-inf")

    def debug(self, msg: object, *args: object, **kwargs: Any) -> None:
        """aiohttp's level for a first request that cannot be read, and for details, which are dropped."""
        if isinstance(error := kwargs.get("exc_info"), HttpProcessingError):
            self._report(msg, error)

    def exception(self, msg: object, *args: object, exc_info: Any = True, **kwargs: Any) -> None:
        """aiohttp's level for later ones, and for everything unexpected."""
        self._report(msg, exc_info)

    def _report(self, msg: object, error: object) -> None:
        if isinstance(error, ConnectionError):
            return  # The client left during the answer, as any may.
        if not isinstance(error, _FAULTS_OF_CLIENTS):
            log.error("http_server_broke", exc=error if isinstance(error, BaseException) else None, what=msg)
            return
        self._unlogged += 1
        now = self._clock()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            log.info("http_unreadable", error=type(error).__name__, count=self._unlogged)
            self._unlogged = 0
