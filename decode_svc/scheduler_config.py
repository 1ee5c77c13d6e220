"""Bounds of the decode tier's policy, and the limits of steps, reservations and sequences that follow. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.running import RunningLimits
from pdserve.engine.sequence_limits import SequenceLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationLimits:
    """Bounds on the blocks that wait for transfers."""

    #: Maximum number of blocks that wait at a time. A single request may exceed it on an otherwise empty worker.
    max_reserved_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSchedulerConfig:
    """Bounds on a step, on a sequence, and on the blocks that transfers may hold."""

    limits: SequenceLimits
    #: Maximum number of sequences that one step computes.
    max_num_seqs: int = 256
    #: Maximum number of prefill tokens that one step computes.
    max_num_batched_tokens: int = 2048
    #: Target duration of a step that computes prefill tokens alongside decoding sequences. Prefill advances by at
    #: least a block per step, so a step can take longer.
    itl_budget_s: float = 0.05
    #: Share of all blocks that may wait for transfers. A request may exceed it when it is the only one on this worker.
    max_reserved_share: float = 0.5
    #: Tokens that a grammar forces are appended at once, and computed together.
    appends_forced: bool = False

    def running_limits(self, pool: BlockPool) -> RunningLimits:
        """Bounds on a step; `pool` determines the size of a block."""
        return RunningLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            itl_budget_s=self.itl_budget_s,
            min_prefill_tokens=min(pool.block_size, self.max_num_batched_tokens),
        )

    def reservation_limits(self, pool: BlockPool) -> ReservationLimits:
        """Bounds on the blocks of `pool` that wait for transfers."""
        return ReservationLimits(max_reserved_blocks=int(self.max_reserved_share * pool.num_blocks))

    def limits_within(self, pool: BlockPool) -> SequenceLimits:
        """Bounds on a sequence whose KV has to fit into `pool`.

        A sequence that fills the whole pool ends (LENGTH) with one token more, whose KV is never needed. It fills
        the pool alone, so it could neither grow nor gain by preemption.
        """
        capacity = pool.num_blocks // pool.num_groups * pool.block_size
        max_model_len = min(self.limits.max_model_len, capacity + 1)
        return replace(self.limits, max_model_len=max_model_len, appends_forced=self.appends_forced)
