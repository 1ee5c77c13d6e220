"""A request as the decode tier's policy sees it: what was asked, and how far it has come. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import Enum

from pdserve.base.ids import NO_ROUTER, BlockHash, BlockId, RequestId, RouterId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.sequence import Sequence, SequenceLimits
from pdserve.engine.step import RequestStarted


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSchedulerConfig:
    """Bounds of a step, of a sequence, and of what transfers may hold."""

    limits: SequenceLimits
    #: Sequences that one step computes at most.
    max_num_seqs: int = 256
    #: Prefill tokens that one step computes at most.
    max_num_batched_tokens: int = 2048
    #: Prefill beside decoding sequences is sized to keep a step within this time, as far as a block at a time can.
    itl_budget_s: float = 0.05
    #: Share of all blocks that may wait for a transfer; one request may exceed it when nothing else is here.
    max_reserved_share: float = 0.5
    #: Blocks that can be on their way at a time, whatever the share; prompts with more are computed here.
    max_receivable_blocks: int = sys.maxsize
    #: Blocks that arrive together; fewer take as much of that room.
    bundle_blocks: int = 1

    def room_for(self, num_blocks: int) -> int:
        """What blocks that are to be received take of what can be."""
        return -(-num_blocks // self.bundle_blocks) * self.bundle_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeJob:
    """One request to decode."""

    request_id: RequestId
    prompt_token_ids: Items[int]
    params: SamplingParams
    #: Key of the block hashes; carries the tenant's salt.
    hash_key: bytes
    #: Hashes of the first full blocks, if already computed; spares the step thread the work.
    hashes: Items[BlockHash] = ()
    #: Compute the prompt here, without a grant, when at most this many of its tokens are not cached here; 0: never.
    #: A prompt of which more blocks are missing than can be received is computed here in any case.
    local_prefill_threshold: int = 0
    #: Who sent it.
    router_id: RouterId = NO_ROUTER


class Phase(Enum):
    """Where a request is on this worker."""

    WAITING = "waiting for blocks"
    RESERVED = "waiting for its KV"
    COMPUTING = "computing its prompt"
    RUNNING = "running"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Mutable, owned by the scheduler."""

    job: DecodeJob
    #: The bare prompt; becomes the first of the choices.
    stem: Sequence
    phase: Phase = Phase.WAITING
    locally: bool = False
    forced_first_tokens: tuple[int, ...] = ()
    num_cached: int = 0
    #: Blocks that wait for a transfer.
    num_receiving: int = 0
    #: Choices that were stopped, whether they run already or not.
    stopped: set[int] = field(default_factory=set)
    #: Sequences that are active or preempted, by choice; the stem alone while the prompt is computed.
    sequences: dict[int, Sequence] = field(default_factory=dict)

    def started(self, block_table: tuple[BlockId, ...]) -> RequestStarted:
        """What is told when the first step computes something of it; `block_table`: of the prompt."""
        return RequestStarted(
            request_id=self.job.request_id,
            prefilled_locally=self.locally,
            num_cached=self.num_cached,
            block_table=block_table,
        )

    def open_choices(self) -> tuple[int, ...]:
        """Choices whose first token is to be sampled here."""
        if self.forced_first_tokens:
            return ()
        return tuple(choice for choice in range(self.job.params.n) if choice not in self.stopped)


def queued_by_router(requests: Iterable[Request]) -> dict[RouterId, int]:
    """Tokens of prompts that are (still) to be computed here.

    Not what preempted sequences compute again: their routers have seen a first token.
    """
    queued: dict[RouterId, int] = {}
    for request in requests:
        is_queued = request.phase is Phase.COMPUTING or (request.phase is Phase.WAITING and request.locally)
        # A single token is computed as those of decoding sequences are, and in nobody's way.
        if is_queued and request.stem.num_pending > 1:
            router_id = request.job.router_id
            queued[router_id] = queued.get(router_id, 0) + request.stem.num_pending
    return queued
