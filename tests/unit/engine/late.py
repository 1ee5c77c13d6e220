"""A fake device that computes as late as possible, and a worker that runs ahead on it with every step checked."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from pdserve.base.ids import BlockHash, BlockId, RequestId
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.device_rows import stand_in
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.pace import Pace
from pdserve.engine.runner import ReportLayers, Results, Runner, StepDecoder, TokenSampler
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.sequence import Sampled, SampleFailure, SampleResult, SampleRow
from pdserve.engine.step import Load, StepEvents, StepPlan
from pdserve.engine.stepper import Stepper
from pdserve.model.batch import TENSORS, Batch
from pdserve.model.grammar import TokenBits
from pdserve.model.thinking import ThinkingState
from tests.unit.engine.fakes import Worker


@dataclass(eq=False, kw_only=True)
class _Launched:
    """A launched step, copied so that later changes on the host cannot affect it."""

    plan: StepPlan
    batch: Batch | None
    #: None: they are not known before the tokens of the step before are.
    rows: list[SampleRow] | None
    logits_rows: list[int]


class LateRunner(Runner):
    """Computes a step only when its results are collected, so that the host's actions until then must not matter."""

    overlaps = True

    def __init__(self, decoder: StepDecoder, kv_cache: KvCache, sampler: TokenSampler) -> None:
        super().__init__(decoder, kv_cache, sampler)
        self.in_flight: list[_Launched] = []
        self._token_ids = torch.empty(0, dtype=torch.int64)

    def launch(self, plan: StepPlan, batch: Batch | None, report_layers: ReportLayers | None = None) -> Results:
        assert len(self.in_flight) < 2, "a third step is launched"
        assert plan.is_ahead == bool(self.in_flight), "a step was launched behind one that it does not continue"
        rows, logits_rows = plan.sample_rows()
        launched = _Launched(
            plan=plan,
            batch=None if batch is None else replace(batch, **{name: getattr(batch, name).clone() for name in TENSORS}),
            rows=None
            if plan.is_ahead and any(row.follows_next for row in rows)
            else [_as_launched(row, is_ahead=plan.is_ahead) for row in rows],
            logits_rows=logits_rows,
        )
        self.in_flight.append(launched)
        return partial(self._collect, launched)

    def settle(self) -> bool:
        if not self.in_flight:
            return False
        self._settle(self.in_flight[-1])
        return True

    def _settle(self, launched: _Launched) -> None:
        if launched.rows is None:
            launched.rows = [
                _as_launched(row, is_ahead=False) if sequence.block_table else stand_in(row)
                for sequence, row in zip(launched.plan.decoding, launched.plan.sample_rows()[0], strict=True)
            ]

    def blocks_written(self) -> set[int]:
        """Blocks to which steps in flight write."""
        batches = (launched.batch for launched in self.in_flight)
        size = self.kv_cache.layout.block_size
        return {slot // size for batch in batches if batch is not None for slot in batch.slot_mapping.tolist()}

    def _collect(self, launched: _Launched) -> list[SampleResult]:
        assert self.in_flight[0] is launched, "steps are collected out of order"
        batch, is_ahead = launched.batch, launched.plan.is_ahead
        if batch is not None and is_ahead:
            batch.token_ids.copy_(self._token_ids.clamp(min=0))
            for row, token_id in zip(launched.rows or (), batch.token_ids.tolist(), strict=False):
                row.tokens[-1] = token_id
        self._settle(launched)
        logits = self.forward(launched.plan, batch)
        results: list[SampleResult] = []
        if logits is not None and launched.rows:
            results = self._sampler.sample(logits, launched.rows, launched.logits_rows)
            self._token_ids = torch.tensor([r.token_id if isinstance(r, Sampled) else -1 for r in results])
        del self.in_flight[0]
        return results


class _Found(ThinkingState):
    """Allows what was allowed when the step was sampled."""

    def __init__(self, allowed: TokenBits | None) -> None:
        self._grammar, self._allowed = None, None if allowed is None else allowed.copy()

    def required(self, tokens: array[int], num_prompt: int) -> TokenBits | None:
        return None

    def allowed(
        self, tokens: array[int], num_prompt: int, banned: Collection[int] = (), listed: TokenBits | None = None
    ) -> TokenBits | None:
        return self._allowed


class _AsLaunched(ThinkingState):
    """Requires what was required when the step was launched, whatever is known when it is computed."""

    def __init__(self, required: TokenBits | None) -> None:
        self._grammar, self._required = None, required

    def required(self, tokens: array[int], num_prompt: int) -> TokenBits | None:
        return self._required


def _as_launched(row: SampleRow, *, is_ahead: bool) -> SampleRow:
    tokens = array("q", row.tokens)
    if is_ahead:
        tokens.append(0)  # Replaced when the step is computed.
    return SampleRow(
        params=row.params,
        choice_index=row.choice_index,
        tokens=tokens,
        num_prompt=row.num_prompt,
        stop_ids=row.stop_ids,
        grammar=_grammar_as_launched(row),
        rules=row.rules,
        listed=row.listed,
    )


def _grammar_as_launched(row: SampleRow) -> ThinkingState | None:
    if row.grammar is None:
        return None
    if isinstance(row.grammar, ThinkingState):
        return _AsLaunched(row.grammar.required(row.tokens, row.num_prompt))
    return _Found(row.allowed())


class WatchedPool(BlockPool):
    """Asserts that no block is allocated to which a step in flight writes."""

    #: Returns the blocks to which steps in flight write.
    written: Callable[[], set[int]] = staticmethod(set)

    def allocate(self, count: int) -> list[BlockId] | None:
        blocks = super().allocate(count)
        self._watch(blocks or [])
        return blocks

    def match_prefix(self, hashes: Items[BlockHash], group: int = 0) -> list[BlockId]:  # type: ignore[override]
        blocks = super().match_prefix(hashes, group)
        self._watch(blocks)
        return blocks

    def _watch(self, blocks: Items[BlockId]) -> None:
        assert not self.written().intersection(blocks), "a block is allocated to which a step in flight writes"


@dataclass
class WatchedScheduler:
    """A scheduler whose integrity is checked after every call of a step."""

    scheduler: Scheduler
    check: Callable[[], None]
    #: Replaces the measured pace.
    pace: Callable[[], Pace]
    plans: list[StepPlan] = field(default_factory=list)

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def schedule(self, pace: Pace) -> StepPlan:
        return self._planned(self.scheduler.schedule(self.pace()))

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        ahead = self.scheduler.plan_ahead(plan)
        return None if ahead is None else self._planned(ahead)

    def update(self, plan: StepPlan, sampled: Items[SampleResult]) -> StepEvents:
        events = self.scheduler.update(plan, sampled)
        self.check()
        return events

    def fail(self, request_id: RequestId, failure: SampleFailure) -> None:
        self.scheduler.fail(request_id, failure)

    def load(self) -> Load:
        return self.scheduler.load()

    def _planned(self, plan: StepPlan) -> StepPlan:
        self.check()
        self.plans.append(plan)
        return plan


@dataclass
class LateWorker(Worker):
    """A `Worker` that can also run ahead. Its pool is checked if it is a `WatchedPool`."""

    check: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.late = self.runner = self.make_late_runner()
        if isinstance(self.pool, WatchedPool):
            self.pool.written = self.late.blocks_written
        watched = WatchedScheduler(self.scheduler, self.check, lambda: self.pace, self.plans)
        self.stepper = Stepper(watched, self.late, lambda output: self.note(output.events))

    def make_late_runner(self) -> LateRunner:
        return LateRunner(self.decoder, self.cache, self.sampler)

    def run_ahead(self, max_steps: int) -> list[StepEvents]:
        """Step until `max_steps` are launched, or the scheduler plans no further step ahead."""
        num_left, before = max_steps, len(self.seen)

        def may_go_on() -> bool:
            nonlocal num_left
            num_left -= 1
            return num_left > 0

        self.stepper.step(may_go_on)
        self.stepper.publish()
        assert not self.late.in_flight, "a step is still in flight"
        return self.seen[before:]
