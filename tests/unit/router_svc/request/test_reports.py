"""Reports of workers that no worker of ours makes: the attempt fails, and no timer of the router is set to them."""

from __future__ import annotations

import math

import pytest

from pdserve.base.errors import TransferError
from pdserve.v1 import decode_pb2, prefill_pb2
from router_svc.request.reports import check_decode_event, check_prefill_event


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1e9])
def test_a_duration_that_is_none_fails_the_attempt(seconds: float) -> None:
    started = decode_pb2.DecodeResponse(started=decode_pb2.DecodeStarted(queue_s=seconds))
    done = prefill_pb2.PrefillResponse(done=prefill_pb2.PrefillDone(exposed_s=seconds))
    progress = prefill_pb2.PrefillResponse(progress=prefill_pb2.PrefillProgress(computing_s=seconds))
    with pytest.raises(TransferError, match="queue_s"):
        check_decode_event(started, "started", "decode worker d")
    for event in (done, progress):
        with pytest.raises(TransferError, match="no duration"):
            check_prefill_event(event, "prefill worker p")


@pytest.mark.parametrize("lease_s", [math.nan, math.inf, 0.0, -1.0, 1e9])
def test_a_ticket_without_a_lease_fails_the_attempt(lease_s: float) -> None:
    """The router's limit for the prefill worker's silence is a share of it."""
    ticket = decode_pb2.TicketGranted(ticket=decode_pb2.Ticket(lease_s=lease_s))
    with pytest.raises(TransferError, match="lease"):
        check_decode_event(decode_pb2.DecodeResponse(ticket=ticket), "ticket", "decode worker d")


def test_honest_reports_pass() -> None:
    ticket = decode_pb2.TicketGranted(ticket=decode_pb2.Ticket(lease_s=20.0), reserve_s=0.1)
    check_decode_event(decode_pb2.DecodeResponse(ticket=ticket), "ticket", "decode worker d")
    # Read from a clock at two times, in another order.
    started = decode_pb2.DecodeStarted(queue_s=-1e-4, computing_s=0.2)
    check_decode_event(decode_pb2.DecodeResponse(started=started), "started", "decode worker d")
    check_decode_event(decode_pb2.DecodeResponse(), None, "decode worker d")
    check_prefill_event(prefill_pb2.PrefillResponse(done=prefill_pb2.PrefillDone(queue_s=0.1)), "prefill worker p")
