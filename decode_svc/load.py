"""The load that a decode worker reports. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from decode_svc.request import DecodePhase, ScheduledRequest
from decode_svc.reservations import Reservations
from pdserve.base.ids import RouterId
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.running import RunningSet
from pdserve.engine.step import Load


def decode_load(
    requests: Iterable[ScheduledRequest], reservations: Reservations, running: RunningSet, blocks: BlockManager
) -> Load:
    """The present load; `num_running` counts sequences, `num_held` requests that wait for their KV."""
    return Load(
        num_running=running.num_running,
        num_waiting=reservations.num_waiting + running.num_preempted + running.num_active - running.num_running,
        num_held=reservations.num_reserved,
        queued_prompt_tokens=running.num_pending_tokens + reservations.num_queued_tokens,
        queued_by_router=_queued_by_router(requests),
        free_blocks=blocks.pool.num_free,
        total_blocks=blocks.pool.num_blocks,
        reserved_blocks=reservations.num_reserved_blocks,
        waiting_blocks=reservations.num_waiting_blocks + running.num_waiting_blocks,
        num_preemptions=running.num_preemptions,
        prefix_query_tokens=blocks.num_query_tokens,
        prefix_hit_tokens=blocks.num_hit_tokens,
    )


def _queued_by_router(requests: Iterable[ScheduledRequest]) -> dict[RouterId, int]:
    """Prompt tokens that are still to be computed here, by the router that sent them.

    Tokens that preempted sequences compute again are not counted: their routers have seen a first token.
    """
    queued: dict[RouterId, int] = {}
    for request in requests:
        is_queued = request.phase is DecodePhase.COMPUTING or (request.phase is DecodePhase.WAITING and request.locally)
        # A single pending token is computed like a token of a decoding sequence, and delays no other prompt.
        if is_queued and request.prompt_sequence.num_pending > 1:
            router_id = request.job.router_id
            queued[router_id] = queued.get(router_id, 0) + request.prompt_sequence.num_pending
    return queued
