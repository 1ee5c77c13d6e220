"""How long a request may take, from its arrival to its last token."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.base.errors import RequestError

#: Field and header that set a request's timeout.
TIMEOUT_FIELD, TIMEOUT_HEADER = "timeout", "X-Request-Timeout"
#: The longest that a request may set, unless the router's flag says otherwise.
MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutLimits:
    """How long requests may take: those that do not say, and at most."""

    default_s: float = 3600.0
    max_s: float = MAX_TIMEOUT_S

    def require(self, timeout_s: float, *, param: str) -> float:
        """The timeout. Raises `RequestError` for one beyond the limit."""
        if not 0 < timeout_s <= self.max_s:
            raise RequestError(
                f"`{param}` is {timeout_s:g} s; it must be above 0 and at most {self.max_s:g} "
                "(--max-request-timeout-s). Change it, or leave it out.",
                param=param,
            )
        return timeout_s

    def of_header(self, text: str | None) -> float:
        """The timeout that a request has before its body is known. Raises `RequestError`."""
        if text is None:
            return min(self.default_s, self.max_s)
        try:
            return self.require(float(text[:40]), param=TIMEOUT_HEADER)
        except ValueError:
            raise RequestError(
                f"The header {TIMEOUT_HEADER} is {text[:40]!r}; it must be a number of seconds, such as 30.",
                param=TIMEOUT_HEADER,
            ) from None
