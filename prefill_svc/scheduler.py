"""Policy of the prefill tier: prompts first come, first served, computed in chunks under a token budget per step. Pure.

    add -> WAITING --blocks for the whole prompt--> COMPUTING --last chunk--> COMPUTED --release--> RELEASED

A COMPUTED prompt has reported its first tokens; it holds its blocks because they are still being sent. `release` ends a
prompt in every phase. `TRANSITIONS` in request.py has every move.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import BlockTables, RequestId, RouterId
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import Sampled, SampleFailure, SampleResult, SampleRow, Sequence
from pdserve.engine.step import EventLog, LayersWritten, Load, PrefillChunk, StepEvents, StepPlan
from prefill_svc.request import PrefillJob, PrefillPhase, PrefillSchedulerConfig, PromptQueues, ScheduledPrompt


class PrefillScheduler:
    """Implements `pdserve.engine.step.Scheduler`; every method is called on the step thread."""

    def __init__(self, pool: BlockPool, config: PrefillSchedulerConfig) -> None:
        assert config.max_num_batched_tokens > 0, "a step must be allowed at least one token"
        self._pool = pool
        self._blocks = BlockManager(pool)
        self._config = config
        self._prompts = PromptQueues()
        self._events = EventLog(tier="prefill")
        #: Blocks were freed or a prompt has arrived since the last look at the waiting prompts.
        self._must_rescan_waiting = False
        #: Maximum number of tokens in the next step, beyond that of the config; None: no other.
        self.max_step_tokens: int | None = None

    # Commands, between steps.
    def add(self, job: PrefillJob) -> None:
        """Queue a prompt.

        Raises `RequestError` for a prompt the model cannot take, `NoFreeBlocks` for one that this worker could never
        hold, `InvalidTransition` for a request id that is still here.
        """
        if self._prompts.find(job.request_id) is not None:
            raise InvalidTransition(f"Request {job.request_id} is already being computed on this worker.")
        job.require_servable(self._config.limits, self._pool, num_output_tokens=0)
        if job.forced_first_tokens:
            self._config.limits.check_first_tokens(job.forced_first_tokens, job.params)
        sequence = job.new_sequence()
        num_cached = self._blocks.count_cached(sequence)
        self._prompts.add(ScheduledPrompt(job=job, sequence=sequence, num_cached=num_cached))
        self._must_rescan_waiting = True

    def release(self, request_id: RequestId) -> bool:
        """Forget a prompt in any phase and free its blocks. False when it is not here (any more)."""
        prompt = self._prompts.find(request_id)
        if prompt is None:
            return False
        self._prompts.move(prompt, PrefillPhase.RELEASED)
        self._blocks.free(prompt.sequence)
        self._must_rescan_waiting = True
        return True

    def hand_back(self) -> list[RequestId]:
        """Forget the prompts of which nothing is computed; returns their requests."""
        handed_back = [prompt.request_id for prompt in self._prompts.in_phase(PrefillPhase.WAITING)]
        for request_id in handed_back:
            self.release(request_id)
        return handed_back

    def block_tables(self, request_id: RequestId) -> BlockTables:
        """Blocks of the prompt, in order; empty while it waits. Raises `InvalidTransition` for an unknown one."""
        return self._blocks.prompt_blocks(self._expect(request_id).sequence)

    def num_computed(self, request_id: RequestId) -> int:
        """Prompt tokens whose KV is stored, cached ones included. Raises `InvalidTransition` for an unknown request."""
        return self._expect(request_id).sequence.num_computed

    def num_cached(self, request_id: RequestId) -> int:
        """Prompt tokens found in the prefix cache; while the prompt waits, those found when it arrived.

        Raises `InvalidTransition` for an unknown request.
        """
        return self._expect(request_id).num_cached

    def blocks_freed(self) -> None:
        """Another scheduler of the same pool has freed blocks: look again at what waits."""
        self._must_rescan_waiting = True

    # The step.
    def has_work(self) -> bool:
        """Whether a step would compute or report anything."""
        is_computing = bool(self._prompts.in_phase(PrefillPhase.COMPUTING))
        is_waiting = bool(self._prompts.in_phase(PrefillPhase.WAITING))
        return is_computing or bool(self._events) or (self._must_rescan_waiting and is_waiting)

    def schedule(self, pace: Pace) -> StepPlan:
        """Chunks of the oldest prompts until the budget is spent; one that does not fit holds up those behind it.

        No decoding sequence of this scheduler is delayed by these chunks, so the pace does not matter.
        """
        self._must_rescan_waiting = False
        budget = self._config.max_num_batched_tokens
        if self.max_step_tokens is not None:
            budget = min(budget, self.max_step_tokens)
        chunks: list[PrefillChunk] = []
        reports: list[LayersWritten] = []
        for prompt in self._prompts.in_phase(PrefillPhase.COMPUTING):
            if _may_join(chunks, prompt):
                budget -= self._plan_chunk(prompt, budget, chunks)
        while budget > 0 and (admitted := self._admit_next(chunks)) is not None:
            budget -= self._plan_chunk(admitted, budget, chunks)
        for chunk in chunks:
            reports += self._expect(chunk.sequence.request_id).layer_reports(chunk.stop)
        return StepPlan(chunks=tuple(chunks), reports=tuple(reports))

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """Never: compared with a step of chunks, the time between two steps is short."""
        return None

    def update(self, plan: StepPlan, sampled: Items[SampleResult]) -> StepEvents:
        """Take in what was computed; report the first tokens of prompts that are complete."""
        results = iter(sampled)
        for chunk in plan.chunks:
            prompt = self._expect(chunk.sequence.request_id)
            self._blocks.advance(prompt.sequence, chunk.stop)
            self._events.progress.append(prompt.progress())
            first_tokens = [next(results) for _ in chunk.samples]
            if not prompt.sequence.num_pending:
                self._complete(prompt, first_tokens)
        return self._events.drain(self._pool.drain_events())

    def fail(self, request_id: RequestId, failure: SampleFailure) -> None:
        """End a prompt of the present plan, and report why."""
        self._events.fail(request_id, failure)
        self.release(request_id)

    def load(self) -> Load:
        """The present load; `num_running` counts prompts."""
        waiting = self._prompts.in_phase(PrefillPhase.WAITING)
        computing = self._prompts.in_phase(PrefillPhase.COMPUTING)
        by_router: dict[RouterId, int] = {}
        for prompt in (*waiting, *computing):
            router_id = prompt.job.router_id
            by_router[router_id] = by_router.get(router_id, 0) + prompt.num_missing
        return Load(
            num_running=len(computing),
            num_waiting=len(waiting),
            num_held=len(self._prompts.in_phase(PrefillPhase.COMPUTED)),
            queued_prompt_tokens=sum(by_router.values()),
            queued_by_router=by_router,
            free_blocks=self._pool.num_free,
            total_blocks=self._pool.num_blocks,
            reserved_blocks=0,
            waiting_blocks=sum(self._pool.blocks_of_all_groups_for(prompt.num_missing) for prompt in waiting),
            num_preemptions=0,
            prefix_query_tokens=self._blocks.num_query_tokens,
            prefix_hit_tokens=self._blocks.num_hit_tokens,
        )

    def check_integrity(self) -> None:
        """Assert that the pool is sound and that its references are exactly those of the prompts here."""
        for prompt in self._prompts.in_phase(PrefillPhase.WAITING):
            assert not prompt.sequence.block_table, f"{prompt.request_id} waits for blocks and holds some"
        self._pool.check_integrity(each.sequence.held_blocks() for each in self._prompts)

    def _expect(self, request_id: RequestId) -> ScheduledPrompt:
        if (prompt := self._prompts.find(request_id)) is None:
            raise InvalidTransition(f"Request {request_id} is not on this worker.")
        return prompt

    def _admit_next(self, chunks: Items[PrefillChunk]) -> ScheduledPrompt | None:
        """Give the first waiting prompt its blocks; None when it may not join the step, or has to wait for blocks."""
        prompt = next(iter(self._prompts.in_phase(PrefillPhase.WAITING)), None)
        if prompt is None or not _may_join(chunks, prompt):
            self._must_rescan_waiting |= prompt is not None
            return None
        if not self._blocks.admit(prompt.sequence, prompt.sequence.num_prompt):
            return None
        prompt.num_cached = prompt.sequence.num_computed
        self._prompts.move(prompt, PrefillPhase.COMPUTING)
        return prompt

    def _plan_chunk(self, prompt: ScheduledPrompt, budget: int, chunks: list[PrefillChunk]) -> int:
        """Add the prompt's next chunk of at most `budget` tokens; returns its size."""
        sequence = prompt.sequence
        size = min(budget, sequence.num_pending)
        if size <= 0:
            return 0
        if not prompt.block_tables:
            prompt.block_tables = self._blocks.prompt_blocks(sequence)
            self._events.started.append(prompt.started())
        is_last = size == sequence.num_pending
        chunks.append(
            PrefillChunk(
                sequence=sequence,
                start=sequence.num_computed,
                stop=sequence.num_computed + size,
                samples=self._first_token_rows(sequence) if is_last and not prompt.job.forced_first_tokens else (),
            )
        )
        return size

    def _first_token_rows(self, sequence: Sequence) -> tuple[SampleRow, ...]:
        return tuple(self._config.limits.sample_row(sequence, choice) for choice in range(sequence.params.n))

    def _complete(self, prompt: ScheduledPrompt, sampled: Items[SampleResult]) -> None:
        """Report the first token of every choice, or the failure; the sequence itself stays the bare prompt."""
        results = sampled or [Sampled(token_id=token) for token in prompt.job.forced_first_tokens]
        if failures := [result for result in results if isinstance(result, SampleFailure)]:
            self.fail(prompt.request_id, failures[0])
            return
        tokens = [result for result in results if isinstance(result, Sampled)]
        self._prompts.move(prompt, PrefillPhase.COMPUTED)
        self._events.tokens[prompt.request_id] = [
            self._config.limits.choice_tokens(prompt.sequence, choice, token) for choice, token in enumerate(tokens)
        ]


def _may_join(chunks: Items[PrefillChunk], prompt: ScheduledPrompt) -> bool:
    """Whether a step with these chunks may have one of the prompt: one that runs alone gets steps of its own."""
    return not chunks or not (prompt.sequence.is_alone or chunks[0].sequence.is_alone)
