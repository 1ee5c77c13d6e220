"""The whole error hierarchy, and the one table that turns an error into HTTP and gRPC codes.

Each of six families implies a reaction: fix the request, retry, transfer again, drop the message, give up, or degrade.
`SetupError` stops a process from starting. An error's text says what failed, the value, the limit, and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

#: Longest text of a `SetupError`, in characters.
_MAX_LINE = 4000


class PdserveError(Exception):
    """Base of all errors that pdserve raises deliberately."""


# The request is wrong: never retried.
class RequestError(PdserveError):
    """The request itself is wrong. `param` names the field at fault, if there is one."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotFound(RequestError):
    """Something that the request names does not exist: a model, a request id, a path."""


class TooLarge(RequestError):
    """The request would cost more than one request may: bytes, tokens, keys or log-probabilities."""


class ContextExceeded(RequestError):
    """The prompt with what is to be generated is longer than the context."""


class PayloadTooLarge(TooLarge):
    """The request body exceeds the limit."""


class HeadersTooLarge(TooLarge):
    """The request line or the headers exceed a limit."""


class MethodNotAllowed(RequestError):
    """The path does not support this HTTP method, but those that are `allowed`."""

    def __init__(self, message: str, *, param: str | None = None, allowed: Collection[str] = ()) -> None:
        super().__init__(message, param=param)
        self.allowed = allowed


class UnsupportedMediaType(RequestError):
    """The request body is declared to be something other than JSON."""


class Unauthorized(RequestError):
    """The request has no API key that is known and valid."""


class Forbidden(RequestError):
    """The caller is known, or needs no key, but may not do this."""


class Quarantined(RequestError):
    """Workers have failed under this very request, which is refused for some minutes."""


# Not enough capacity: retried on another worker, or later.
class CapacityError(PdserveError):
    """There is no capacity for the request here at present."""


class Overloaded(CapacityError):
    """The cluster's queue is full. `retry_after_s` is computed from the rate at which it drains."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Displaced(Overloaded):
    """The request lost its place in a full queue to clients that have fewer requests there."""


class RateLimited(Overloaded):
    """The API key has used what it may use at present."""


class QuotaExceeded(RateLimited):
    """The API key has used its budget."""


class NoWorkers(CapacityError):
    """No worker of the needed tier is ready."""


class NoFreeBlocks(CapacityError):
    """A worker cannot hold the request's KV blocks."""


class Draining(CapacityError):
    """The process is shutting down and accepts no new work."""


# A failed transfer: sent again, or recomputed.
class TransferError(PdserveError):
    """KV blocks, or the call that moves them, did not arrive."""


class PeerLost(TransferError):
    """The other process is gone or unreachable."""


class TransferTimeout(TransferError):
    """A transfer made no progress within its lease."""

    #: How far the transfer of a lease that has ended was, as the label of a metric.
    progress = ""


class DigestMismatch(TransferError):
    """The bytes received are not those that were sent."""


class LayoutMismatch(TransferError):
    """The two workers store KV blocks in different layouts."""


class Diverged(TransferError):
    """Two workers have computed different tokens for one position."""


class PeerRefused(TransferError):
    """The message is not from this cluster, or not for the first time here."""


# A stale message: dropped.
class StaleError(PdserveError):
    """The message belongs to an attempt, epoch or state that has ended."""


class StaleAttempt(StaleError):
    """The message belongs to an older attempt of the request."""


class StaleEpoch(StaleError):
    """The message is meant for an earlier incarnation of this worker."""


class InvalidTransition(StaleError):
    """The transition is not in the state machine's table."""


# The request was ended on purpose: its client or its owner wants no answer any more.
class EndedEarly(PdserveError):
    """The request was ended before it was complete, and nothing is wrong with it or with the cluster."""


class DeadlineExceeded(EndedEarly):
    """The request was not complete within its timeout."""


class Cancelled(EndedEarly):
    """The request was cancelled by its owner."""


# Redis is unavailable: service continues, degraded.
class StoreError(PdserveError):
    """Redis cannot be used at present."""


class Unreadable(StoreError):
    """What is stored is damaged, of another version, or not from this cluster. It will not be readable later."""


class SetupError(PdserveError):
    """The process cannot start because of a setting, the model or the machine. Shown as one line, with exit code 1.

    Parts of the text may come from a file that nobody has checked: control characters are escaped, and its length is
    limited.
    """

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


def _one_line(text: str) -> str:
    line = " ".join(text[: 2 * _MAX_LINE].splitlines())
    if not line.isprintable():
        line = "".join(map(_printable, line))
    return line if len(line) <= _MAX_LINE else line[: _MAX_LINE - 3] + "..."


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """The codes of an error class that clients see: HTTP status, OpenAI error type, gRPC status name."""

    http: int
    openai_type: str
    grpc: str
    #: OpenAI's name of the error, where its clients look for one; empty: the HTTP status stands for it.
    openai_code: str = ""


_TABLE: dict[type[PdserveError], Codes] = {
    PdserveError: Codes(http=500, openai_type="internal_error", grpc="INTERNAL"),
    RequestError: Codes(http=400, openai_type="invalid_request_error", grpc="INVALID_ARGUMENT"),
    NotFound: Codes(http=404, openai_type="not_found_error", grpc="NOT_FOUND"),
    TooLarge: Codes(http=413, openai_type="invalid_request_error", grpc="INVALID_ARGUMENT"),
    ContextExceeded: Codes(http=400, openai_type="invalid_request_error", grpc="INVALID_ARGUMENT"),
    PayloadTooLarge: Codes(http=413, openai_type="invalid_request_error", grpc="INVALID_ARGUMENT"),
    HeadersTooLarge: Codes(http=431, openai_type="invalid_request_error", grpc="INVALID_ARGUMENT"),
    MethodNotAllowed: Codes(http=405, openai_type="invalid_request_error", grpc="UNIMPLEMENTED"),
    UnsupportedMediaType: Codes(http=415, openai_type="invalid_request_error", grpc="INVALID_ARGUMENT"),
    Unauthorized: Codes(
        http=401, openai_type="invalid_request_error", grpc="UNAUTHENTICATED", openai_code="invalid_api_key"
    ),
    Forbidden: Codes(http=403, openai_type="permission_error", grpc="PERMISSION_DENIED"),
    Quarantined: Codes(http=422, openai_type="invalid_request_error", grpc="FAILED_PRECONDITION"),
    CapacityError: Codes(http=503, openai_type="overloaded_error", grpc="RESOURCE_EXHAUSTED"),
    Overloaded: Codes(http=429, openai_type="rate_limit_error", grpc="RESOURCE_EXHAUSTED"),
    Displaced: Codes(http=429, openai_type="rate_limit_error", grpc="RESOURCE_EXHAUSTED"),
    RateLimited: Codes(
        http=429, openai_type="rate_limit_error", grpc="RESOURCE_EXHAUSTED", openai_code="rate_limit_exceeded"
    ),
    QuotaExceeded: Codes(
        http=429, openai_type="rate_limit_error", grpc="RESOURCE_EXHAUSTED", openai_code="insufficient_quota"
    ),
    NoWorkers: Codes(http=503, openai_type="overloaded_error", grpc="UNAVAILABLE"),
    NoFreeBlocks: Codes(http=503, openai_type="overloaded_error", grpc="RESOURCE_EXHAUSTED"),
    Draining: Codes(http=503, openai_type="overloaded_error", grpc="UNAVAILABLE"),
    TransferError: Codes(http=502, openai_type="transfer_error", grpc="ABORTED"),
    PeerLost: Codes(http=502, openai_type="worker_lost_error", grpc="UNAVAILABLE"),
    TransferTimeout: Codes(http=504, openai_type="transfer_error", grpc="DEADLINE_EXCEEDED"),
    DigestMismatch: Codes(http=502, openai_type="transfer_error", grpc="DATA_LOSS"),
    LayoutMismatch: Codes(http=502, openai_type="transfer_error", grpc="FAILED_PRECONDITION"),
    Diverged: Codes(http=502, openai_type="transfer_error", grpc="FAILED_PRECONDITION"),
    PeerRefused: Codes(http=502, openai_type="transfer_error", grpc="UNAUTHENTICATED"),
    StaleError: Codes(http=409, openai_type="stale_error", grpc="ABORTED"),
    StaleAttempt: Codes(http=409, openai_type="stale_error", grpc="ABORTED"),
    StaleEpoch: Codes(http=409, openai_type="stale_error", grpc="ABORTED"),
    InvalidTransition: Codes(http=409, openai_type="stale_error", grpc="ABORTED"),
    # 499 as in Google's mapping of CANCELLED; 409 would be tried again by OpenAI's clients.
    EndedEarly: Codes(http=499, openai_type="cancelled_error", grpc="CANCELLED"),
    DeadlineExceeded: Codes(
        http=504, openai_type="timeout_error", grpc="DEADLINE_EXCEEDED", openai_code="deadline_exceeded"
    ),
    Cancelled: Codes(http=499, openai_type="cancelled_error", grpc="CANCELLED", openai_code="request_cancelled"),
    StoreError: Codes(http=503, openai_type="store_error", grpc="UNAVAILABLE"),
    Unreadable: Codes(http=500, openai_type="store_error", grpc="DATA_LOSS"),
    SetupError: Codes(http=500, openai_type="internal_error", grpc="INTERNAL"),
}


def codes_of(error: PdserveError) -> Codes:
    """The error's codes. The table has every class of this module, which a test verifies."""
    return next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)


def all_codes() -> tuple[Codes, ...]:
    """The codes of all classes."""
    return tuple(_TABLE.values())


def classes_of_status(status: int) -> list[type[PdserveError]]:
    """The classes that have this HTTP status."""
    return [cls for cls, codes in _TABLE.items() if codes.http == status and cls is not SetupError]


def reason_of(error: PdserveError) -> str:
    """The error's class as the label of a metric, such as `peer_lost`."""
    return reason_of_class(type(error))


def reason_of_class(error_class: type[PdserveError]) -> str:
    """As `reason_of`, for every error of this class."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", error_class.__name__).lower()


def error_classes() -> dict[str, type[PdserveError]]:
    """All error classes by the name that gRPC trailing metadata carries."""
    return {cls.__name__: cls for cls in _TABLE}
