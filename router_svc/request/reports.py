"""What a worker reports about a request, checked before anything is computed with it.

A router believes its workers. But where a cluster has no secret anybody can be one, and a timer that is set to NaN
stops all other timers of the process.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.base.errors import TransferError
from pdserve.v1 import decode_pb2, prefill_pb2
from router_svc.records.migration_metrics import REASONS

#: Limit on the amount of a duration. It may be a little below 0, since clocks of a process are read in another order.
_MAX_DURATION_S = 1e6
_MAX_LEASE_S = 3600.0


def check_decode_event(event: decode_pb2.DecodeResponse, kind: str | None, peer: str) -> None:
    """Raises `TransferError` for an event that no worker of this version sends. `kind` is its `WhichOneof`."""
    if kind == "started":
        _require_durations(peer, queue_s=event.started.queue_s, computing_s=event.started.computing_s)
    elif kind == "leave" and event.leave.reason not in REASONS:
        raise TransferError(f"The {peer} asks to be left for the unknown reason {event.leave.reason[:40]!r}.")
    elif kind == "ticket":
        _require_durations(peer, reserve_s=event.ticket.reserve_s)
        lease_s = event.ticket.ticket.lease_s
        if not 0 < lease_s <= _MAX_LEASE_S:
            raise TransferError(f"The {peer} sent a ticket with a lease of {lease_s} s (limit {_MAX_LEASE_S:g} s).")


def check_prefill_event(event: prefill_pb2.PrefillResponse, peer: str) -> None:
    """Raises `TransferError` for an event that no worker of this version sends."""
    if event.HasField("progress"):
        _require_durations(peer, computing_s=event.progress.computing_s)
    elif event.HasField("done"):
        _require_durations(peer, **dict(_durations_of(event.done)))


def _durations_of(done: prefill_pb2.PrefillDone) -> Iterator[tuple[str, float]]:
    for name in ("queue_s", "compute_s", "transfer_s", "commit_s", "exposed_s"):
        yield name, getattr(done, name)


def _require_durations(peer: str, **durations: float) -> None:
    for name, seconds in durations.items():
        if not abs(seconds) <= _MAX_DURATION_S:
            raise TransferError(f"The {peer} reported {name} = {seconds}, which is no duration.")
