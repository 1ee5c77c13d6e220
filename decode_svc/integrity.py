"""What always holds between the parts of a decode scheduler. Pure; for tests."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from decode_svc.request import DecodePhase, ScheduledRequest
from decode_svc.reservations import Reservations
from pdserve.base.ids import BlockId
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.running import RunningSet


def check_integrity(
    requests: Collection[ScheduledRequest],
    reservations: Reservations,
    running: RunningSet,
    transfers: Iterable[list[BlockId]],
    pool: BlockPool,
) -> None:
    """Assert that queues and counters are sound, and that `requests` and `transfers` account for all references."""
    reservations.check_integrity(requests)
    sequences = [sequence for request in requests for sequence in request.sequences.values()]
    assert set(map(id, sequences)) == set(map(id, running)), "a running sequence belongs to no request"
    running.check_integrity()
    reserved = [request.prompt_sequence for request in requests if request.phase is DecodePhase.RESERVED]
    pool.check_integrity([*(holder.held_blocks() for holder in sequences + reserved), *transfers])
