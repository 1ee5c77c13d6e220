"""Losses of workers with and without a request."""

from __future__ import annotations

from pdserve.base.ids import Epoch, WorkerId
from router_svc.request.losses import Losses
from router_svc.routing.incarnation import Incarnation


def worker(index: int) -> Incarnation:
    return (WorkerId(f"decode-{index}"), Epoch("e"))


def test_losses_of_equal_requests_and_of_the_time_before_are_not_elsewhere() -> None:
    losses = Losses()
    losses.add(worker(0), b"a", 1.0)
    losses.add(worker(1), b"b", 2.0)
    losses.add(worker(2), b"b", 3.0)
    losses.add(worker(2), b"a", 3.5)
    losses.add(worker(3), b"c", 4.0)
    assert losses.without(b"a", since=0.0) == 2
    assert losses.without(b"a", since=2.5) == 1
    assert losses.without(b"d", since=0.0) == 4


def test_memory_of_losses_is_bounded() -> None:
    losses = Losses()
    for index in range(5000):
        losses.add(worker(0), index.to_bytes(4, "big"), 0.0)
        losses.add(worker(index), b"a", 0.0)
    assert losses.without(b"other", since=0.0) <= 256
    assert sum(len(loss.digests) for loss in losses._losses.values()) <= 2048
