"""Which failures of a call mean that the worker is gone, and what it says about leaving."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdserve.base.errors import PeerLost
from pdserve.v1 import decode_pb2
from router_svc.request.calls import DecodeCall, is_gone
from router_svc.routing.silence import SilenceLimits


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


async def test_a_worker_may_take_back_that_it_is_to_be_left() -> None:
    """Fails when a request moves although its worker serves again."""
    events = [
        decode_pb2.DecodeResponse(leave=decode_pb2.LeaveRequested(reason="drain", is_withdrawn=is_withdrawn))
        for is_withdrawn in (False, True)
    ]

    async def read(silence_s: float | None) -> decode_pb2.DecodeResponse:
        return events.pop(0)

    worker: Any = SimpleNamespace(worker_id="d", tier="decode", grpc_address="", stream_address="", epoch=1)
    limits = cast(SilenceLimits, SimpleNamespace(of_decode=lambda worker, has_started: None))
    reasons: list[str] = []
    call = DecodeCall(cast(Any, SimpleNamespace(read=read)), worker, lambda: reasons.append(call.leave_reason))
    await call.next_event(limits)
    assert call.must_leave
    await call.next_event(limits)
    assert not call.must_leave
    assert reasons == ["drain", ""]
