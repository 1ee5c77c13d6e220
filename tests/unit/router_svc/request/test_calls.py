"""Which failures of a call mean that the worker is gone."""

from __future__ import annotations

import errno

import pytest

from pdserve.base.errors import PeerLost
from router_svc.request.calls import is_gone


def lost(cause: BaseException) -> PeerLost:
    error = PeerLost("Lost decode worker d.")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "cause",
    [
        ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
        ConnectionResetError(),
        TimeoutError(),
        OSError(errno.EHOSTUNREACH, "no route"),
    ],
)
def test_a_connection_error_of_the_worker_means_that_it_is_gone(cause: OSError) -> None:
    assert is_gone(lost(cause))


@pytest.mark.parametrize(
    "cause", [OSError(errno.EMFILE, "too many open files"), OSError(errno.EADDRNOTAVAIL, "no port left")]
)
def test_a_connection_error_of_the_router_does_not(cause: OSError) -> None:
    assert not is_gone(lost(cause))
