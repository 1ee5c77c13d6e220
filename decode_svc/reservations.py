"""Requests that wait for blocks, and requests whose blocks wait for a transfer. Pure."""

from __future__ import annotations

from collections.abc import Collection

from decode_svc.migration.requests import moving_hashes
from decode_svc.request import DecodeMove, DecodePhase, ScheduledRequest
from decode_svc.scheduler_config import ReservationLimits
from pdserve.base.ids import RequestId
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.job import queue_by_arrival
from pdserve.engine.running import Room


class Reservations:
    """Admits requests in order of arrival at their first worker. A request that does not fit holds up those behind it.

    Best-effort requests come after all others, and running ones give up their blocks for others.
    WAITING requests hold no blocks; RESERVED ones hold those of their prompt and of one more token.
    """

    def __init__(self, blocks: BlockManager, limits: ReservationLimits) -> None:
        self._blocks = blocks
        self._limits = limits
        #: Requests that wait for blocks, in the order of their turns.
        self._waiting: dict[RequestId, ScheduledRequest] = {}
        #: Free blocks that each waiting request needs, as of its arrival.
        self._needed: dict[RequestId, int] = {}
        #: RESERVED requests, each with the number of blocks that it waits for.
        self._missing: dict[RequestId, int] = {}
        #: Blocks of RESERVED requests that no other request holds.
        self._reserved: dict[RequestId, int] = {}
        self._num_missing = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for blocks."""
        return len(self._waiting)

    @property
    def num_reserved(self) -> int:
        """Requests that hold blocks for a transfer."""
        return len(self._missing)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks held for transfers: those to be received, and one per request for its first new token."""
        return sum(self._reserved.values())

    @property
    def num_waiting_blocks(self) -> int:
        """Free blocks that the waiting requests need."""
        return sum(self._needed.values())

    @property
    def is_receiving(self) -> bool:
        """Whether blocks wait for a transfer: sequences may start to decode in any step."""
        return self._num_missing > 0

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of waiting requests that are to be computed here."""
        return sum(request.prompt_sequence.num_prompt for request in self._waiting.values() if request.locally)

    def add(self, request: ScheduledRequest) -> None:
        """Queue a request for its blocks."""
        pool, sequence = self._blocks.pool, request.prompt_sequence
        num_uncached = sequence.num_prompt + 1 - self._blocks.count_cached(sequence, recompute_last=False)
        queue_by_arrival(self._waiting, request)
        self._needed[request.request_id] = pool.blocks_of_all_groups_for(num_uncached)

    @property
    def next(self) -> ScheduledRequest | None:
        """The first request in the queue."""
        return next(iter(self._waiting.values()), None)

    @property
    def others_wait(self) -> bool:
        """Whether a request waits that is not best-effort."""
        return self.next is not None and not self.next.job.is_best_effort

    def admit(self, request: ScheduledRequest, room: Room) -> bool:
        """Give the first request in the queue its blocks and move it on; False when it cannot have them now.

        It becomes RESERVED, or COMPUTING when its prompt is computed here.
        """
        if request.job.is_moving:
            return self._admit_moving(request, room)
        pool, sequence = self._blocks.pool, request.prompt_sequence
        num_cached = self._blocks.count_cached(sequence, recompute_last=False)
        num_blocks = pool.blocks_for(sequence.num_prompt)
        first_missing = self._blocks.first_missing(sequence.num_prompt, num_cached)
        num_missing = sum(num_blocks - first for first in first_missing)
        locally = self._is_computed_here(request, sequence.num_prompt - num_cached)
        if not locally and not self._may_receive(num_missing, room):
            return False
        while not self._blocks.admit(sequence, sequence.num_prompt + 1, headroom=room.headroom, recompute_last=locally):
            if not room.make_room():
                return False
        self.remove(request)
        request.num_cached = sequence.num_computed
        if locally:
            request.advance(DecodeMove.COMPUTE)
        else:
            num_fresh = len(sequence.block_table) - sequence.num_computed // pool.block_size
            self._hold(request, num_missing, num_fresh * pool.num_groups)
        return True

    def _hold(self, request: ScheduledRequest, num_missing: int, num_reserved: int) -> None:
        request.advance(DecodeMove.GRANT)
        self._missing[request.request_id] = num_missing
        self._reserved[request.request_id] = num_reserved
        self._num_missing += num_missing

    def _admit_moving(self, request: ScheduledRequest, room: Room) -> bool:
        """Give a request from another worker blocks for as much of its KV as may be received: the rest is computed."""
        pool, carrier = self._blocks.pool, request.prompt_sequence
        hashes = moving_hashes(request, pool.block_size)
        num_cached = pool.count_prefix(hashes)
        del hashes[num_cached + self._limits.max_reserved_blocks :]
        num_fresh = len(hashes) - num_cached
        # Each choice also needs a block for the tokens behind its last full one. On an otherwise empty worker, choices
        # that do not fit together run one after the other.
        if not self._may_receive(num_fresh, room):
            return False
        while num_fresh + room.headroom + len(request.output) > pool.num_free and pool.num_free < pool.num_blocks:
            if not room.make_room():
                return False
        carrier.block_table.extend(pool.match_prefix(hashes))
        fresh = pool.allocate(num_fresh)
        if fresh is None:  # `match_prefix` took cached blocks, which had counted as free.
            self._blocks.free(carrier)
            return False
        carrier.block_table.extend(fresh)
        self.remove(request)
        request.moved, request.num_cached = hashes, num_cached * pool.block_size
        self._hold(request, num_fresh, num_fresh)
        return True

    def remove(self, request: ScheduledRequest) -> None:
        """Take a request out, with whatever blocks it holds. No effect on one that is not here."""
        self._waiting.pop(request.request_id, None)
        self._needed.pop(request.request_id, None)
        self._reserved.pop(request.request_id, None)
        self._num_missing -= self._missing.pop(request.request_id, 0)

    def check_integrity(self, requests: Collection[ScheduledRequest]) -> None:
        """Assert that this holds exactly the WAITING and RESERVED ones of `requests`, in order, and counts right."""
        phases = {phase: [r.request_id for r in requests if r.phase is phase] for phase in DecodePhase}
        assert set(self._waiting) == set(phases[DecodePhase.WAITING]), "the queue has other requests"
        turns = [request.job.turn for request in self._waiting.values()]
        assert turns == sorted(turns), "the queue is out of order"
        assert set(self._needed) == set(self._waiting), "needed blocks are counted for another queue"
        assert set(self._missing) == set(phases[DecodePhase.RESERVED]), "a reservation belongs to no request"
        assert set(self._reserved) == set(self._missing), "reserved blocks belong to no request"
        assert self._num_missing == sum(self._missing.values()), "missing blocks are miscounted"

    def _is_computed_here(self, request: ScheduledRequest, num_uncached_tokens: int) -> bool:
        threshold = request.job.local_prefill_threshold
        is_small = threshold > 0 and num_uncached_tokens <= threshold
        return request.locally or is_small

    def _may_receive(self, num_blocks: int, room: Room) -> bool:
        pool = self._blocks.pool
        if self._num_missing + num_blocks <= self._limits.max_reserved_blocks:
            return True
        if not room.headroom and not self._missing:  # Only best-effort requests run, and they give way.
            while pool.num_free < pool.num_blocks and room.make_room():
                pass
        return pool.num_free == pool.num_blocks
