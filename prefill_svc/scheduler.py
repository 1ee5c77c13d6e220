"""Policy of the prefill tier: prompts first come, first served, computed in chunks under a token budget per step. Pure.

A job's life: waiting (no blocks) -> computing (blocks for its whole prompt) -> computed (first tokens told, blocks held
until `release`, because they are still being sent). `abort` ends it anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from pdserve.base.errors import InvalidTransition, NoFreeBlocks, PdserveError
from pdserve.base.ids import NO_ROUTER, BlockHash, BlockId, RequestId, RouterId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import Sampled, SampleFailure, SampleResult, SampleRow, Sequence, SequenceLimits
from pdserve.engine.step import (
    Chunk,
    EventLog,
    Failure,
    LayersWritten,
    Load,
    PrefillProgress,
    RequestStarted,
    StepEvents,
    StepPlan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillSchedulerConfig:
    """Bounds of a step and of a sequence."""

    limits: SequenceLimits
    #: Prompt tokens that one step computes at most.
    max_num_batched_tokens: int = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """One prompt to compute."""

    request_id: RequestId
    prompt_token_ids: Items[int]
    params: SamplingParams
    #: Key of the block hashes; carries the tenant's salt.
    hash_key: bytes
    #: Hashes of the first full blocks, if already computed; spares the step thread the work.
    hashes: Items[BlockHash] = ()
    #: First tokens that were already streamed, one per choice, to be told instead of sampling.
    forced_first_tokens: tuple[int, ...] = ()
    #: Told, in every chunk, as soon as so many layers have their KV: ascending, at most the model's number.
    report_layers: tuple[int, ...] = ()
    #: Who sent it.
    router_id: RouterId = NO_ROUTER


@dataclass(slots=True, eq=False, kw_only=True)
class _Active:
    job: PrefillJob
    sequence: Sequence
    #: While it waits: what the prefix cache had of it when it came.
    num_cached: int
    #: Of the whole prompt; empty before the first chunk.
    block_table: tuple[BlockId, ...] = ()

    @property
    def num_missing(self) -> int:
        """Prompt tokens to compute, or to be expected."""
        return self.sequence.num_prompt - max(self.sequence.num_computed, self.num_cached)


@dataclass(slots=True, kw_only=True)
class _Queues:
    """Each job is in exactly one of them, in order of arrival."""

    waiting: dict[RequestId, _Active] = field(default_factory=dict)
    computing: dict[RequestId, _Active] = field(default_factory=dict)
    computed: dict[RequestId, _Active] = field(default_factory=dict)

    def all(self) -> tuple[dict[RequestId, _Active], ...]:
        return self.waiting, self.computing, self.computed


class PrefillScheduler:
    """Implements `pdserve.engine.step.Scheduler`; every method is called on the step thread."""

    def __init__(self, pool: BlockPool, config: PrefillSchedulerConfig) -> None:
        assert config.max_num_batched_tokens > 0, "a step must be allowed at least one token"
        self._pool = pool
        self._blocks = BlockManager(pool)
        self._config = config
        self._queues = _Queues()
        self._log = EventLog()
        #: Something changed since the waiting jobs were last looked at.
        self._stirred = False

    def add(self, job: PrefillJob) -> None:
        """Queue a prompt.

        Raises `RequestError` for a prompt the model cannot take, `NoFreeBlocks` for one that this worker could never
        hold, `InvalidTransition` for a request id that is still here.
        """
        if any(job.request_id in queue for queue in self._queues.all()):
            raise InvalidTransition(f"Request {job.request_id} is already being computed on this worker.")
        self._config.limits.check(job.prompt_token_ids, job.params)
        if job.forced_first_tokens:
            self._config.limits.check_first_tokens(job.forced_first_tokens, job.params)
        needed = self._pool.blocks_for(len(job.prompt_token_ids))
        if needed > self._pool.num_blocks:
            raise NoFreeBlocks(
                f"The prompt of request {job.request_id} needs {needed} KV blocks, but this prefill worker has "
                f"{self._pool.num_blocks} in all. Give it a larger KV cache."
            )
        sequence = Sequence.from_prompt(
            job.request_id, job.prompt_token_ids, job.params, hash_key=job.hash_key, hashes=job.hashes
        )
        num_cached = self._blocks.count_cached(sequence)
        self._queues.waiting[job.request_id] = _Active(job=job, sequence=sequence, num_cached=num_cached)
        self._stirred = True

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request wherever it is and free its blocks. False when it is not here (any more)."""
        for queue in self._queues.all():
            active = queue.pop(request_id, None)
            if active is not None:
                self._blocks.free(active.sequence)
                self._stirred = True
                return True
        return False

    def release(self, request_id: RequestId) -> None:
        """Free the blocks of a computed prompt: they have arrived, or nobody wants them.

        Raises `InvalidTransition` when the prompt is not computed: that would be an abort.
        """
        if request_id not in self._queues.computed:
            raise InvalidTransition(f"Request {request_id} has no computed prompt on this worker.")
        self.abort(request_id)

    def block_table(self, request_id: RequestId) -> tuple[BlockId, ...]:
        """Blocks of the prompt, in order; empty while the job waits. Raises `InvalidTransition` for an unknown one."""
        return tuple(BlockId(block) for block in self._find(request_id).sequence.block_table)

    def num_computed(self, request_id: RequestId) -> int:
        """Prompt tokens whose KV is stored, cached ones included. Raises `InvalidTransition` for an unknown request."""
        return self._find(request_id).sequence.num_computed

    def num_cached(self, request_id: RequestId) -> int:
        """Prompt tokens that the prefix cache had; while the job waits, when it came.

        Raises `InvalidTransition` for an unknown request.
        """
        return self._find(request_id).num_cached

    def has_work(self) -> bool:
        """Whether a step would do or tell anything."""
        return bool(self._queues.computing) or bool(self._log) or (self._stirred and bool(self._queues.waiting))

    def schedule(self, pace: Pace) -> StepPlan:
        """Chunks of the oldest prompts until the budget is spent; one that does not fit holds up those behind it.

        Nobody waits for a token beside them, so the pace does not matter.
        """
        self._stirred = False
        budget = self._config.max_num_batched_tokens
        chunks: list[Chunk] = []
        for active in self._queues.computing.values():
            budget -= self._plan_chunk(active, budget, chunks)
        while budget > 0 and self._queues.waiting:
            request_id, active = next(iter(self._queues.waiting.items()))
            if not self._blocks.admit(active.sequence, active.sequence.num_prompt):
                break
            active.num_cached = active.sequence.num_computed
            self._queues.computing[request_id] = self._queues.waiting.pop(request_id)
            budget -= self._plan_chunk(active, budget, chunks)
        reports = [report for chunk in chunks for report in self._reports(chunk)]
        return StepPlan(chunks=tuple(chunks), reports=tuple(reports))

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Never: beside a step of chunks, the time between two steps is short."""
        return None

    def update(self, plan: StepPlan, sampled: Items[SampleResult]) -> StepEvents:
        """Note what was computed; tell the first tokens of prompts that are complete."""
        results = iter(sampled)
        for chunk in plan.chunks:
            active = self._queues.computing[chunk.sequence.request_id]
            self._blocks.advance(active.sequence, chunk.stop)
            self._log.progress.append(
                PrefillProgress(
                    request_id=active.job.request_id,
                    num_computed=chunk.stop,
                    num_prompt=active.sequence.num_prompt,
                    num_cached=active.num_cached,
                )
            )
            drawn = [next(results) for _ in chunk.samples]
            if not active.sequence.num_pending:
                self._complete(active, drawn)
        return self._log.drain(self._pool.drain_events())

    def load(self) -> Load:
        """The present load; `num_running` are prompts."""
        queues = self._queues
        by_router: dict[RouterId, int] = {}
        for active in (*queues.waiting.values(), *queues.computing.values()):
            router_id = active.job.router_id
            by_router[router_id] = by_router.get(router_id, 0) + active.num_missing
        return Load(
            num_running=len(queues.computing),
            num_waiting=len(queues.waiting),
            num_held=len(queues.computed),
            queued_prompt_tokens=sum(by_router.values()),
            queued_by_router=by_router,
            free_blocks=self._pool.num_free,
            total_blocks=self._pool.num_blocks,
            num_preemptions=0,
            prefix_query_tokens=self._blocks.num_query_tokens,
            prefix_hit_tokens=self._blocks.num_hit_tokens,
        )

    def check_integrity(self) -> None:
        """Assert that the pool is sound and that its references are exactly those of the jobs here."""
        self._pool.check_integrity(
            [BlockId(block) for block in active.sequence.block_table]
            for queue in self._queues.all()
            for active in queue.values()
        )

    def _find(self, request_id: RequestId) -> _Active:
        for queue in self._queues.all():
            if request_id in queue:
                return queue[request_id]
        raise InvalidTransition(f"Request {request_id} is not on this worker.")

    def _plan_chunk(self, active: _Active, budget: int, chunks: list[Chunk]) -> int:
        """Add the job's next chunk of at most `budget` tokens; its size."""
        sequence = active.sequence
        size = min(budget, sequence.num_pending)
        if size <= 0:
            return 0
        if not active.block_table:
            active.block_table = self.block_table(active.job.request_id)
            self._log.started.append(
                RequestStarted(
                    request_id=active.job.request_id,
                    prefilled_locally=True,
                    num_cached=active.num_cached,
                    block_table=active.block_table,
                )
            )
        is_last = size == sequence.num_pending
        chunks.append(
            Chunk(
                sequence=sequence,
                start=sequence.num_computed,
                stop=sequence.num_computed + size,
                samples=self._first_token_rows(sequence) if is_last and not active.job.forced_first_tokens else (),
            )
        )
        return size

    def _reports(self, chunk: Chunk) -> Iterator[LayersWritten]:
        active = self._queues.computing[chunk.sequence.request_id]
        for num_layers in active.job.report_layers:
            yield LayersWritten(
                request_id=active.job.request_id,
                num_layers=num_layers,
                num_computed=chunk.stop,
                block_table=active.block_table,
            )

    def _first_token_rows(self, sequence: Sequence) -> tuple[SampleRow, ...]:
        return tuple(self._config.limits.sample_row(sequence, choice) for choice in range(sequence.params.n))

    def _complete(self, active: _Active, drawn: list[SampleResult]) -> None:
        """Tell the first token of every choice, or the failure; the sequence itself stays the bare prompt."""
        request_id = active.job.request_id
        results = drawn or [Sampled(token_id=token) for token in active.job.forced_first_tokens]
        failure = next((result for result in results if isinstance(result, SampleFailure)), None)
        if failure is not None:
            self.abort(request_id)
            error = PdserveError(f"Request {request_id} cannot go on: {failure.reason}.")
            self._log.failures.append(Failure(request_id=request_id, error=error))
            return
        self._queues.computed[request_id] = self._queues.computing.pop(request_id)
        self._log.tokens[request_id] = [
            self._config.limits.choice_tokens(active.sequence, choice, result)
            for choice, result in enumerate(results)
            if isinstance(result, Sampled)
        ]
