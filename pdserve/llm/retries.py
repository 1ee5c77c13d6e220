"""When a request that failed is sent again."""

from __future__ import annotations

from pdserve.base.errors import Overloaded, PdserveError, PeerLost, QuotaExceeded

#: Tries of a request whose connection is lost before any output. A router that is restarted is back by then.
_CONNECTION_TRIES = 5
_FIRST_PAUSE_S = 0.25


class Retries:
    """The retries of one request: while the server is overloaded, up to a limit, and after lost connections."""

    def __init__(self, overload_timeout_s: float) -> None:
        self._left_s = overload_timeout_s
        self._tries = 0

    def pause_s(self, error: PdserveError) -> float:
        """How long to wait after a failure. Raises the error if the request is not sent again."""
        if isinstance(error, Overloaded) and not isinstance(error, QuotaExceeded):
            self._left_s -= error.retry_after_s
            if self._left_s >= 0:
                return error.retry_after_s
        if isinstance(error, PeerLost):
            self._tries += 1
            if self._tries < _CONNECTION_TRIES:
                return _FIRST_PAUSE_S * 2.0 ** (self._tries - 1)
        raise error
