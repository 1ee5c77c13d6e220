"""The whole error hierarchy, and the one table that turns an error into HTTP and gRPC codes.

Each of the five families says what the caller may do about it; `SetupError` is for what stops a process from starting.
An error's text says what failed, on what, and what to do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


class PdserveError(Exception):
    """Base of everything pdserve raises on purpose."""


# The caller's fault: never retried.
class RequestError(PdserveError):
    """The request itself is wrong. `param` names the field, when one is to blame."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotFound(RequestError):
    """What the request names does not exist (a model, a request id, a path)."""


class PayloadTooLarge(RequestError):
    """The request body exceeds the limit."""


class MethodNotAllowed(RequestError):
    """The path exists, but not for this HTTP method."""


# Elsewhere or later.
class CapacityError(PdserveError):
    """There is no room for the request here and now."""


class Overloaded(CapacityError):
    """The cluster's queue is full; `retry_after_s` is computed from how fast it drains."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoWorkers(CapacityError):
    """No worker of the needed tier is ready."""


class NoFreeBlocks(CapacityError):
    """A worker cannot hold the request's KV blocks."""


class Draining(CapacityError):
    """The worker is shutting down and takes no new work."""


# Send again, or recompute.
class TransferError(PdserveError):
    """KV blocks or the call that moves them did not get through."""


class PeerLost(TransferError):
    """The other process is gone or cannot be reached."""


class TransferTimeout(TransferError):
    """A transfer made no progress within its lease."""


class DigestMismatch(TransferError):
    """Received bytes are not the bytes that were sent."""


class LayoutMismatch(TransferError):
    """The two workers do not store KV the same way."""


# Fenced: drop it.
class StaleError(PdserveError):
    """The message belongs to an attempt, an epoch or a state that is over."""


class StaleAttempt(StaleError):
    """An older attempt of the request."""


class StaleEpoch(StaleError):
    """Meant for an earlier incarnation of this worker."""


class InvalidTransition(StaleError):
    """A state machine was asked for a move its table does not have."""


# Degrade.
class StoreError(PdserveError):
    """Redis cannot be used at the moment."""


class SetupError(PdserveError):
    """The process cannot start: a setting, a model or the machine is not as needed. Shown as one line, exit code 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """How one error class is told to clients: HTTP status, OpenAI error type, gRPC status name."""

    http: int
    openai_type: str
    grpc: str


_TABLE: dict[type[PdserveError], Codes] = {
    PdserveError: Codes(http=500, openai_type="internal_error", grpc="INTERNAL"),
    RequestError: Codes(http=400, openai_type="invalid_request_error", grpc="INVALID_ARGUMENT"),
    NotFound: Codes(http=404, openai_type="not_found_error", grpc="NOT_FOUND"),
    PayloadTooLarge: Codes(http=413, openai_type="invalid_request_error", grpc="INVALID_ARGUMENT"),
    MethodNotAllowed: Codes(http=405, openai_type="invalid_request_error", grpc="UNIMPLEMENTED"),
    CapacityError: Codes(http=503, openai_type="overloaded_error", grpc="RESOURCE_EXHAUSTED"),
    Overloaded: Codes(http=429, openai_type="rate_limit_error", grpc="RESOURCE_EXHAUSTED"),
    NoWorkers: Codes(http=503, openai_type="overloaded_error", grpc="UNAVAILABLE"),
    NoFreeBlocks: Codes(http=503, openai_type="overloaded_error", grpc="RESOURCE_EXHAUSTED"),
    Draining: Codes(http=503, openai_type="overloaded_error", grpc="UNAVAILABLE"),
    TransferError: Codes(http=502, openai_type="transfer_error", grpc="ABORTED"),
    PeerLost: Codes(http=502, openai_type="worker_lost_error", grpc="UNAVAILABLE"),
    TransferTimeout: Codes(http=504, openai_type="transfer_error", grpc="DEADLINE_EXCEEDED"),
    DigestMismatch: Codes(http=502, openai_type="transfer_error", grpc="DATA_LOSS"),
    LayoutMismatch: Codes(http=502, openai_type="transfer_error", grpc="FAILED_PRECONDITION"),
    StaleError: Codes(http=409, openai_type="stale_error", grpc="ABORTED"),
    StaleAttempt: Codes(http=409, openai_type="stale_error", grpc="ABORTED"),
    StaleEpoch: Codes(http=409, openai_type="stale_error", grpc="ABORTED"),
    InvalidTransition: Codes(http=409, openai_type="stale_error", grpc="ABORTED"),
    StoreError: Codes(http=503, openai_type="store_error", grpc="UNAVAILABLE"),
    SetupError: Codes(http=500, openai_type="internal_error", grpc="INTERNAL"),
}


def codes_of(error: PdserveError) -> Codes:
    """The codes of an error; the table names every class of this page (a test proves it)."""
    return next(_TABLE[cls] for cls in type(error).__mro__ if cls in _TABLE)


def reason_of(error: PdserveError) -> str:
    """The error's class as a metric's label: `peer_lost`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()


def error_classes() -> dict[str, type[PdserveError]]:
    """Every error class by name, as it travels in gRPC trailing metadata."""
    return {cls.__name__: cls for cls in _TABLE}
