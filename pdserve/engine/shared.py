"""One scheduler made of those of both tiers, for a worker that changes its role and serves both meanwhile. Pure.

The two share a block pool and nothing else. Each step belongs to one of them: they take turns while both have work.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Protocol

from pdserve.base.ids import RequestId, RouterId
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.pace import Pace
from pdserve.engine.running import RunningLimits
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import SampleFailure, SampleResult
from pdserve.engine.step import Load, StepEvents, StepPlan
from pdserve.peers.workers import Tier


class SharingScheduler(Scheduler, Protocol):
    """A scheduler that is not the only one to use its block pool."""

    def blocks_freed(self) -> None:
        """The other one has freed blocks, which may be what a request waits for."""


class PromptScheduler(SharingScheduler, Protocol):
    """The scheduler of the prefill tier."""

    max_step_tokens: int | None


class SharedScheduler:
    """Implements `pdserve.engine.scheduler.Scheduler`; every method is called on the step thread."""

    def __init__(
        self, pool: BlockPool, *, prefill: PromptScheduler, decode: SharingScheduler, limits: RunningLimits
    ) -> None:
        """`limits` keep steps of prompts short while the decode tier has work."""
        self._pool = pool
        self._prefill = prefill
        self._decode = decode
        self._limits = limits
        #: Whose step was planned last.
        self._turn: Tier = "prefill"
        #: Free blocks after the last plan. Another number means that some may have been freed.
        self._num_free = pool.num_free

    def has_work(self) -> bool:
        """Whether a step would compute or report anything, after a look at what waits if blocks were freed."""
        if self._pool.num_free != self._num_free:
            self._num_free = self._pool.num_free
            self._prefill.blocks_freed()
            self._decode.blocks_freed()
        return self._decode.has_work() or self._prefill.has_work()

    def schedule(self, pace: Pace) -> StepPlan:
        """Plan a step of the tier whose turn it is."""
        is_decoding = self._decode.has_work()
        if is_decoding and (self._turn == "prefill" or not self._prefill.has_work()):
            self._turn = "decode"
            plan = self._decode.schedule(pace)
        else:
            self._turn = "prefill"
            self._prefill.max_step_tokens = self._limits.prefill_budget(pace, is_decoding=True) if is_decoding else None
            plan = self._prefill.schedule(pace)
        self._num_free = self._pool.num_free
        return plan

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """None also when the other tier waits for its turn."""
        if self._turn == "prefill" or self._prefill.has_work():
            return None
        following = self._decode.plan_ahead(plan)
        self._num_free = self._pool.num_free
        return following

    def update(self, plan: StepPlan, sampled: Items[SampleResult]) -> StepEvents:
        """Process the results of a step."""
        return self._at_work.update(plan, sampled)

    def fail(self, request_id: RequestId, failure: SampleFailure) -> None:
        """End a request of the present plan."""
        self._at_work.fail(request_id, failure)

    def load(self) -> Load:
        """The load of both tiers together."""
        prefill, decode = self._prefill.load(), self._decode.load()
        queued: dict[RouterId, int] = dict(decode.queued_by_router)
        for router_id, tokens in prefill.queued_by_router.items():
            queued[router_id] = queued.get(router_id, 0) + tokens
        return Load(
            num_running=prefill.num_running + decode.num_running,
            num_waiting=prefill.num_waiting + decode.num_waiting,
            num_held=prefill.num_held + decode.num_held,
            queued_prompt_tokens=prefill.queued_prompt_tokens + decode.queued_prompt_tokens,
            queued_by_router=queued,
            free_blocks=decode.free_blocks,
            total_blocks=decode.total_blocks,
            reserved_blocks=decode.reserved_blocks,
            waiting_blocks=prefill.waiting_blocks + decode.waiting_blocks,
            num_preemptions=decode.num_preemptions,
            prefix_query_tokens=prefill.prefix_query_tokens + decode.prefix_query_tokens,
            prefix_hit_tokens=prefill.prefix_hit_tokens + decode.prefix_hit_tokens,
        )

    @property
    def _at_work(self) -> Scheduler:
        """Whose plan is in flight: nothing else is planned until all of its results are here."""
        return self._prefill if self._turn == "prefill" else self._decode
