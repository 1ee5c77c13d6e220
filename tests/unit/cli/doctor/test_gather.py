"""What doctor makes of a worker that ends a test transfer early."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from pdserve.base.errors import PeerLost
from pdserve.cli.doctor.facts import SeenWorker
from pdserve.cli.doctor.gather import next_event
from pdserve.v1 import diagnostics_pb2 as pb

RECEIVER = SeenWorker(worker_id="decode-0", tier="decode", is_ready=True, grpc_address="h:1")


async def answers(count: int) -> AsyncIterator[pb.ReceiveProbeResponse]:
    for number in range(count):
        yield pb.ReceiveProbeResponse(received=pb.ProbeReceived(num_bytes=number))


async def test_answers_come_one_after_the_other_and_a_missing_one_is_a_lost_peer() -> None:
    events = answers(2)
    assert [(await next_event(events, RECEIVER)).received.num_bytes for _ in range(2)] == [0, 1]
    with pytest.raises(PeerLost, match="Worker decode-0 ended the test transfer early"):
        await next_event(events, RECEIVER)
