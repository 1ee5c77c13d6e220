"""Policy of the prefill tier: prompts first come, first served, computed in chunks under a token budget per step. Pure.

A request that has lost a worker keeps its turn: it came when a router first gave it to one.

    add -> WAITING --blocks for the whole prompt--> COMPUTING --last chunk--> COMPUTED --release--> RELEASED

A COMPUTED prompt has reported its first tokens; it holds its blocks because they are still being sent. `stop` ends the
computing of a prompt whose transfer still has to end, and `release` ends a prompt in every phase. `TRANSITIONS` in
request.py has every move.

A prompt that is scored reports the log-probabilities of its tokens instead. A step scores few of them, since each needs
logits of its own. Such prompts use no cached blocks, and fill the cache like others.

A prompt that is pooled reports an embedding. A step computes either logits or hidden states, so it has steps without
prompts of the other kinds.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import AttemptId, BlockTables, RequestId, RouterId
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.event_log import StepEventLog
from pdserve.engine.hidden_sum import HiddenSum
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import Sampled, SampleFailure, SampleResult, SampleRow
from pdserve.engine.step import (
    Load,
    PrefillChunk,
    PromptEmbedding,
    PromptScores,
    StepEvents,
    StepPlan,
)
from prefill_svc.request import (
    PrefillJob,
    PrefillPhase,
    PrefillSchedulerConfig,
    PromptQueues,
    ScheduledPrompt,
    may_join,
)

#: Duration of a step with best-effort prompts.
_BEST_EFFORT_STEP_S = 0.1


class PrefillScheduler:
    """Implements `pdserve.engine.scheduler.Scheduler`; every method is called on the step thread."""

    def __init__(self, pool: BlockPool, config: PrefillSchedulerConfig) -> None:
        assert config.max_num_batched_tokens > 0, "a step must be allowed at least one token"
        self._pool = pool
        self._blocks = BlockManager(pool)
        self._config = config
        self._prompts = PromptQueues()
        self._events = StepEventLog(tier="prefill")
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
        pool = None if job.pooling is None else HiddenSum()
        self._prompts.add(ScheduledPrompt(job=job, sequence=sequence, num_cached=num_cached, pool=pool))
        self._must_rescan_waiting = True

    def stop(self, request_id: RequestId) -> bool:
        """Compute nothing more of a prompt; it keeps its blocks until `release`. False when it is not here."""
        prompt = self._prompts.find(request_id)
        if prompt is None:
            return False
        if prompt.phase is not PrefillPhase.STOPPED:
            self._prompts.move(prompt, PrefillPhase.STOPPED)
        # One that was in front may have held up those behind it.
        self._must_rescan_waiting = True
        return True

    def release(self, request_id: RequestId) -> bool:
        """Forget a prompt in any phase and free its blocks. False when it is not here (any more)."""
        prompt = self._prompts.find(request_id)
        if prompt is None:
            return False
        self._prompts.move(prompt, PrefillPhase.RELEASED)
        self._blocks.free(prompt.sequence)
        self._must_rescan_waiting = True
        return True

    def hand_back(self) -> list[AttemptId]:
        """Forget the prompts of which nothing is computed; returns whose they are."""
        handed_back = [prompt.job.attempt_id for prompt in self._prompts.in_phase(PrefillPhase.WAITING)]
        for request_id, _ in handed_back:
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
        computing, waiting = map(self._prompts.in_phase, (PrefillPhase.COMPUTING, PrefillPhase.WAITING))
        return bool(computing) or bool(self._events) or (self._must_rescan_waiting and bool(waiting))

    def schedule(self, pace: Pace) -> StepPlan:
        """Chunks of the oldest prompts until the budget is spent; one that does not fit holds up those behind it.

        Best-effort prompts come after all others, in steps that are short at this pace: one that comes meanwhile waits
        for the end of the step. No decoding sequence of this scheduler is delayed by chunks.
        """
        self._must_rescan_waiting = False
        budget = self._config.max_num_batched_tokens
        if self.max_step_tokens is not None:
            budget = min(budget, self.max_step_tokens)
        chunks: list[PrefillChunk] = []
        for is_best_effort in (False, True):
            if is_best_effort:
                short = max(self._pool.block_size, int(_BEST_EFFORT_STEP_S / pace.prefill_token_s))
                budget = min(budget, short - sum(chunk.stop - chunk.start for chunk in chunks))
            for prompt in self._prompts.in_phase(PrefillPhase.COMPUTING):
                if prompt.job.is_best_effort is is_best_effort and may_join(chunks, prompt):
                    budget -= self._plan_chunk(prompt, budget, chunks)
            while budget > 0 and (admitted := self._admit_next(chunks, is_best_effort=is_best_effort)) is not None:
                budget -= self._plan_chunk(admitted, budget, chunks)
        # Without budget, those that wait were not looked at.
        self._must_rescan_waiting |= budget <= 0
        reports = (
            each for chunk in chunks for each in self._expect(chunk.sequence.request_id).layer_reports(chunk.stop)
        )
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
            scores = [next(results) for _ in chunk.scores]
            first_tokens = [next(results) for _ in chunk.samples]
            if failures := [result for result in (*scores, *first_tokens) if isinstance(result, SampleFailure)]:
                self.fail(prompt.request_id, failures[0])
                continue
            if scores:
                self._report_scores(prompt, chunk.start + 1, scores)
            if not prompt.sequence.num_pending:
                self._complete(prompt, first_tokens)
        return self._events.drain(self._pool.drain_events())

    def fail(self, request_id: RequestId, failure: SampleFailure) -> None:
        """End a prompt of the present plan, and report why."""
        self._events.fail(self._expect(request_id).job.attempt_id, failure)
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
            num_held=sum(len(self._prompts.in_phase(phase)) for phase in (PrefillPhase.COMPUTED, PrefillPhase.STOPPED)),
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

    def _admit_next(self, chunks: Items[PrefillChunk], *, is_best_effort: bool) -> ScheduledPrompt | None:
        """Give the first waiting prompt its blocks; None when it may not join the step, or has to wait for blocks."""
        prompt = next(iter(self._prompts.in_phase(PrefillPhase.WAITING)), None)
        if prompt is None or prompt.job.is_best_effort is not is_best_effort:
            return None
        if not may_join(chunks, prompt):
            self._must_rescan_waiting = True
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
        if prompt.job.is_scored:
            size = min(size, self._config.max_scored_tokens - sum(len(chunk.scores) for chunk in chunks))
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
                samples=self._first_token_rows(prompt) if is_last else (),
                scores=self._score_rows(prompt, sequence.num_computed, sequence.num_computed + size),
                pool=prompt.pool,
                pooled_rows=prompt.job.pooled_rows(sequence.num_computed, sequence.num_computed + size),
            )
        )
        return size

    def _first_token_rows(self, prompt: ScheduledPrompt) -> tuple[SampleRow, ...]:
        if prompt.job.forced_first_tokens or prompt.job.is_scored or prompt.pool is not None:
            return ()
        sequence = prompt.sequence
        return tuple(self._config.limits.sample_row(sequence, choice) for choice in range(sequence.params.n))

    def _score_rows(self, prompt: ScheduledPrompt, start: int, stop: int) -> tuple[SampleRow, ...]:
        return self._config.limits.score_rows(prompt.sequence, start, stop) if prompt.job.is_scored else ()

    def _report_scores(self, prompt: ScheduledPrompt, first: int, scores: Items[SampleResult]) -> None:
        logprobs = [each.logprobs for each in scores if isinstance(each, Sampled) and each.logprobs is not None]
        assert len(logprobs) == len(scores), "scores are requested with log-probabilities"
        event = PromptScores(**prompt.job.attempt_id._asdict(), first=first, logprobs=tuple(logprobs))
        self._events.scores.append(event)

    def _report_embedding(self, prompt: ScheduledPrompt, pool: HiddenSum) -> None:
        assert prompt.job.pooling is not None
        values = pool.embedding(prompt.job.pooling)
        if values is None:
            self.fail(prompt.request_id, SampleFailure(reason="its embedding has numbers that are not finite"))
            return
        self._prompts.move(prompt, PrefillPhase.COMPUTED)
        self._events.embeddings.append(PromptEmbedding(**prompt.job.attempt_id._asdict(), values=values))

    def _complete(self, prompt: ScheduledPrompt, sampled: Items[SampleResult]) -> None:
        """Report the first token of every choice; the sequence itself stays the bare prompt."""
        if prompt.pool is not None:
            self._report_embedding(prompt, prompt.pool)
            return
        self._prompts.move(prompt, PrefillPhase.COMPUTED)
        if prompt.job.is_scored:
            return
        results = sampled or [Sampled(token_id=token) for token in prompt.job.forced_first_tokens]
        tokens = [result for result in results if isinstance(result, Sampled)]
        self._events.tokens[prompt.job.attempt_id] = [
            self._config.limits.choice_tokens(prompt.sequence, choice, token) for choice, token in enumerate(tokens)
        ]
