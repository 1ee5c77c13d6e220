"""Kinds of failures of workers, by the errors that they cause. Pure."""

from __future__ import annotations

from enum import Enum, auto

from pdserve.base.errors import (
    CapacityError,
    Diverged,
    Draining,
    LayoutMismatch,
    PdserveError,
    PeerLost,
    PeerRefused,
    RequestError,
    StaleError,
    TransferError,
    TransferTimeout,
)


class Failure(Enum):
    """Kinds of failures that the policy distinguishes."""

    #: The request itself is wrong: no worker will accept it.
    REQUEST = auto()
    #: The worker refused for lack of capacity.
    CAPACITY = auto()
    #: The worker refused because it shuts down. It is expected back soon, like a worker that is lost.
    DRAINING = auto()
    #: The worker reported a failed transfer (its lease ran out). It is healthy and may get the request again.
    TRANSFER = auto()
    #: The worker is lost, silent or stale.
    WORKER = auto()
    #: The worker takes the message for a stranger's. It may have restarted since, as another incarnation.
    REFUSED = auto()
    #: The worker lives, and something is wrong with what it made of the request. Other workers may well fail so, too.
    BROKEN = auto()
    #: A prefill worker failed, and with it the attempt of the decode worker that waited for it.
    PREFILL = auto()

    @property
    def avoids_worker(self) -> bool:
        """Whether the request prefers any other worker."""
        return self is not Failure.PREFILL

    @property
    def excludes_worker(self) -> bool:
        """Whether the worker gets no further attempt of this request until something has changed."""
        return self not in (Failure.TRANSFER, Failure.PREFILL)


def failure_of(error: PdserveError, *, is_reported: bool, is_continuation: bool) -> Failure:
    """The kind of a failure.

    Args:
        is_reported: the worker itself has answered with this error.
        is_continuation: another worker has accepted the request before, and has computed tokens of it.
    """
    if isinstance(error, RequestError):
        return Failure.BROKEN if is_continuation else Failure.REQUEST
    if isinstance(error, Draining):
        return Failure.DRAINING
    if isinstance(error, CapacityError):
        return Failure.CAPACITY
    if isinstance(error, PeerRefused):
        return Failure.REFUSED
    if isinstance(error, (LayoutMismatch, Diverged)):
        return Failure.BROKEN
    if isinstance(error, TransferError) and is_reported:
        return Failure.TRANSFER
    return Failure.WORKER if isinstance(error, (PeerLost, TransferTimeout, StaleError)) else Failure.BROKEN
