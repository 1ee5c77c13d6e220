"""Policy of the decode tier: reservations, continuous batching, local prefill in chunks, preemption by recompute. Pure.

    reserve -> WAITING --granted--> RESERVED --activate--> RUNNING -> over
                  |                    | prefill_locally      ^
                  '--few uncached------'--> COMPUTING --------'  (forks into n sequences)

Each step computes the pending tokens of the sequences in the `RunningSet`: one for a decoding sequence, a chunk for one
whose KV is (again) to be computed, sized so that the step stays within the ITL budget at the present pace. When a block
is needed and none is free, the youngest gives way; while one waits for its blocks nothing new is granted, so the oldest
always gets on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace

from decode_svc.request import DecodeJob, DecodeSchedulerConfig, Phase, Request, queued_by_router
from pdserve.base.errors import InvalidTransition, NoFreeBlocks, PdserveError
from pdserve.base.ids import BlockId, RequestId
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.pace import Pace
from pdserve.engine.running import RunningLimits, RunningSet
from pdserve.engine.sequence import Sampled, SampleFailure, SampleResult, SampleRow, Sequence
from pdserve.engine.step import Chunk, EventLog, Failure, Grant, Load, PrefillProgress, StepEvents, StepPlan


class DecodeScheduler:
    """Implements `pdserve.engine.step.Scheduler`; every method is called on the step thread."""

    def __init__(self, pool: BlockPool, config: DecodeSchedulerConfig) -> None:
        self._pool = pool
        self._blocks = BlockManager(pool)
        self._running = RunningSet(
            self._blocks,
            RunningLimits(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                itl_budget_s=config.itl_budget_s,
                min_prefill_tokens=min(pool.block_size, config.max_num_batched_tokens),
            ),
        )
        # A sequence that fills the whole pool ends with one token more, whose KV nobody needs (LENGTH): alone, it could
        # neither grow nor gain by preemption.
        capacity = pool.num_blocks * pool.block_size
        self._limits = replace(config.limits, max_model_len=min(config.limits.max_model_len, capacity + 1))
        self._model_limits = config.limits
        self._room_for = config.room_for
        self._max_receivable = config.max_receivable_blocks
        self._max_receiving = min(int(config.max_reserved_share * pool.num_blocks), self._max_receivable)
        self._requests: dict[RequestId, Request] = {}
        self._waiting: deque[Request] = deque()
        self._num_receiving = 0
        #: Requests that may run, but no step has computed anything of.
        self._unstarted: dict[RequestId, Request] = {}
        self._log = EventLog()
        #: Something changed since those who wait were last looked at.
        self._stirred = False

    # Commands, between steps.
    def reserve(self, job: DecodeJob) -> None:
        """Queue a request for the blocks of its prompt and one more token; a `Grant` or `RequestStarted` follows.

        Raises `RequestError` for a prompt the model cannot take, `NoFreeBlocks` for one that this worker could never
        hold, `InvalidTransition` for a request id that is still here.
        """
        if job.request_id in self._requests:
            raise InvalidTransition(f"Request {job.request_id} is already on this worker.")
        self._model_limits.check(job.prompt_token_ids, job.params)
        num_tokens = len(job.prompt_token_ids)
        needed = self._pool.blocks_for(num_tokens + 1)
        if needed > self._pool.num_blocks:
            raise NoFreeBlocks(
                f"Request {job.request_id} needs {needed} KV blocks for {num_tokens} prompt tokens and one of output, "
                f"but this decode worker has {self._pool.num_blocks} in all. Give it a larger KV cache."
            )
        stem = Sequence.from_prompt(
            job.request_id, job.prompt_token_ids, job.params, hash_key=job.hash_key, hashes=job.hashes
        )
        request = Request(job=job, stem=stem)
        self._requests[job.request_id] = request
        self._waiting.append(request)
        self._stirred = True

    def activate(self, request_id: RequestId, first_tokens: Items[int]) -> None:
        """The KV of the whole prompt is in the granted blocks, verified: run the choices from their first tokens on.

        The prefill worker told the first tokens to the client; they are not told again. Raises `InvalidTransition`
        unless the request is granted and not yet active, `RequestError` for tokens that cannot be.
        """
        request = self._expect(request_id, Phase.RESERVED)
        self._limits.check_first_tokens(first_tokens, request.job.params)
        self._end_reservation(request)
        self._unstarted[request_id] = request
        self._blocks.advance(request.stem, request.stem.num_prompt)
        self._fork(request, dict(enumerate(first_tokens)))

    def prefill_locally(self, request_id: RequestId, forced_first_tokens: Items[int] = ()) -> None:
        """Compute the missing part of the prompt here; then sample the first tokens, or take those a client has seen.

        For a granted request no transfer may be under way any more. Raises `InvalidTransition` once the KV is here or
        being computed, `RequestError` for tokens that cannot be.
        """
        request = self._expect(request_id, Phase.WAITING, Phase.RESERVED)
        if forced_first_tokens:
            self._limits.check_first_tokens(forced_first_tokens, request.job.params)
        request.forced_first_tokens = tuple(forced_first_tokens)
        request.locally = True
        self._stirred = True
        if request.phase is Phase.RESERVED:
            self._end_reservation(request)
            if not request.stem.num_pending:
                self._blocks.recompute_last_token(request.stem)
            self._compute_prompt(request)

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request wherever it is and free its blocks; nothing more is told of it. False when it is not here.

        For a granted request no transfer may be under way any more.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self._drop(request)
        elif request_id in self._log.finished:  # ended by a command, and not told yet
            self._log.finished.remove(request_id)
        return request is not None

    def stop_choice(self, request_id: RequestId, choice_index: int) -> None:
        """End one choice without telling more of its tokens; the last one ends the request.

        An unknown request or choice is over already. A granted request stays, whatever is
        stopped, until its transfer is settled by `activate` or `abort`.
        """
        request = self._requests.get(request_id)
        if request is None or not 0 <= choice_index < request.job.params.n:
            return
        request.stopped.add(choice_index)
        if request.phase is Phase.RUNNING:
            if choice_index in request.sequences:
                self._end(request, request.sequences[choice_index])
        elif request.phase is not Phase.RESERVED and len(request.stopped) == request.job.params.n:
            self._drop(request)
            self._log.finished.append(request_id)

    # The step.
    def has_work(self) -> bool:
        """Whether a step would do or tell anything."""
        is_somebody_waiting = bool(self._waiting) or self._running.num_preempted > 0
        return self._running.num_active > 0 or bool(self._log) or (self._stirred and is_somebody_waiting)

    def schedule(self, pace: Pace) -> StepPlan:
        """Resume what was preempted, grant what waits, then compute the pending tokens of the active sequences."""
        self._stirred = False
        self._running.resume()
        while self._waiting and not self._running.num_preempted and self._grant(self._waiting[0]):
            self._waiting.popleft()
        planned = self._running.plan(pace, is_awaiting=self._num_receiving > 0)
        if planned.preempted:
            self._log.preempted.extend(sequence.request_id for sequence in planned.preempted)
            self._stirred = True
        plan = StepPlan(
            decoding=planned.decoding,
            chunks=tuple(self._chunk(sequence, stop) for sequence, stop in planned.chunks),
            copies=self._pool.drain_copies(),
        )
        if self._unstarted:
            self._note_started(plan.scheduled())
        return plan

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The same sequences again. Those who wait were looked at, and get nothing before something ends."""
        if self._stirred or plan.chunks or not all(map(self._limits.can_go_ahead, plan.decoding)):
            return None
        if not plan.decoding or not self._running.make_room_ahead(plan.decoding):
            return None
        copies = self._pool.drain_copies()
        assert not copies, "only prompts are shared: a step behind one that decodes never enters a shared block"
        return StepPlan(decoding=plan.decoding, is_ahead=True)

    def update(self, plan: StepPlan, sampled: Items[SampleResult]) -> StepEvents:
        """Note what was computed, tell new tokens, end what is complete."""
        for sequence, result in zip(plan.decoding, sampled, strict=False):
            self._take_decoded(sequence, result)
        results = iter(sampled[len(plan.decoding) :])
        for chunk in plan.chunks:
            self._take_chunk(chunk, [next(results) for _ in chunk.samples])
        return self._log.drain(self._pool.drain_events())

    def load(self) -> Load:
        """The present load; `num_running` are sequences, `num_held` requests that wait for their KV."""
        running = self._running
        return Load(
            num_running=running.num_running,
            num_waiting=len(self._waiting) + running.num_preempted + running.num_active - running.num_running,
            num_held=sum(request.phase is Phase.RESERVED for request in self._requests.values()),
            queued_prompt_tokens=running.num_pending_tokens
            + sum(r.stem.num_prompt for r in self._waiting if r.locally),
            queued_by_router=queued_by_router(self._requests.values()),
            free_blocks=self._pool.num_free,
            total_blocks=self._pool.num_blocks,
            num_preemptions=running.num_preemptions,
            prefix_query_tokens=self._blocks.num_query_tokens,
            prefix_hit_tokens=self._blocks.num_hit_tokens,
        )

    def check_integrity(self) -> None:
        """Assert that pool, queues and counters are sound, and references exactly those of the requests here."""
        requests = self._requests.values()
        reserved = [request for request in requests if request.phase is Phase.RESERVED]
        assert self._num_receiving == sum(request.num_receiving for request in reserved), "receiving blocks miscounted"
        assert list(self._waiting) == [r for r in requests if r.phase is Phase.WAITING], "the queue is out of order"
        running = [sequence for request in requests for sequence in request.sequences.values()]
        assert set(map(id, running)) == set(map(id, self._running)), "a running sequence belongs to no request"
        self._running.check_integrity()
        holders = [*running, *(request.stem for request in reserved)]
        self._pool.check_integrity([BlockId(block) for block in holder.block_table] for holder in holders)

    def _expect(self, request_id: RequestId, *phases: Phase) -> Request:
        request = self._requests.get(request_id)
        if request is None or request.phase not in phases:
            where = "not on this worker" if request is None else request.phase.value
            wanted = " or ".join(phase.value for phase in phases)
            raise InvalidTransition(f"Request {request_id} is {where}; this needs one that is {wanted}.")
        return request

    def _grant(self, request: Request) -> bool:
        """Give the request the blocks of its prompt and one more token, if they can be had now.

        A block stays free for each active sequence, so that a newcomer does not cost a preemption at once.
        """
        stem, job = request.stem, request.job
        num_known = self._pool.count_prefix(stem.hash_full_blocks(self._pool.block_size))
        num_missing = self._room_for(self._pool.blocks_for(stem.num_prompt) - num_known)
        num_uncached = stem.num_prompt - num_known * self._pool.block_size
        is_small = job.local_prefill_threshold > 0 and num_uncached <= job.local_prefill_threshold
        locally = request.locally or is_small or num_missing > self._max_receivable
        if not locally and not self._may_receive(num_missing):
            return False
        if not self._blocks.admit(stem, stem.num_prompt + 1, headroom=self._running.num_active, recompute_last=locally):
            return False
        if locally:
            self._compute_prompt(request)
            return True
        request.phase = Phase.RESERVED
        request.num_cached = stem.num_computed
        request.num_receiving = num_missing
        self._num_receiving += num_missing
        table = self._blocks.prompt_blocks(stem)
        self._log.grants.append(Grant(request_id=job.request_id, block_table=table, num_cached_blocks=num_known))
        return True

    def _may_receive(self, num_blocks: int) -> bool:
        return self._num_receiving + num_blocks <= self._max_receiving or self._pool.num_free == self._pool.num_blocks

    def _end_reservation(self, request: Request) -> None:
        self._num_receiving -= request.num_receiving
        request.num_receiving = 0
        self._stirred = True

    def _compute_prompt(self, request: Request) -> None:
        request.phase = Phase.COMPUTING
        request.locally = True
        self._unstarted[request.job.request_id] = request
        request.num_cached = request.stem.num_computed
        request.stem.admission_order = self._running.next_admission_order()
        request.sequences = {0: request.stem}
        self._running.add(request.stem)

    def _fork(self, request: Request, first_tokens: Mapping[int, int]) -> None:
        """Run every choice from its first token on; those that end with it, or were stopped, are over already."""
        request.phase = Phase.RUNNING
        request.sequences = {}
        stem = request.stem
        stem.admission_order = stem.admission_order or self._running.next_admission_order()
        going_on = [
            choice
            for choice, token in first_tokens.items()
            if choice not in request.stopped
            and self._limits.choice_tokens(stem, choice, Sampled(token_id=token)).finish_reason is None
        ]
        # All forks are taken off the bare prompt before the stem grows into the first of the choices.
        forks = [self._blocks.fork(stem, choice) for choice in going_on[1:]]
        if not going_on:
            self._blocks.free(stem)
            self._forget(request)
            return
        stem.choice_index = going_on[0]
        for sequence in (stem, *forks):
            sequence.tokens.append(first_tokens[sequence.choice_index])
            sequence.sampling = self._limits.sample_row(sequence, sequence.choice_index)
            request.sequences[sequence.choice_index] = sequence
            self._running.add(sequence)

    def _note_started(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            request = self._unstarted.pop(sequence.request_id, None)
            if request is not None:
                self._log.started.append(request.started(self._blocks.prompt_blocks(sequence)))

    def _chunk(self, sequence: Sequence, stop: int) -> Chunk:
        """A chunk of a prompt, or of a choice that was preempted; samples follow its last one."""
        samples: tuple[SampleRow, ...] = ()
        if stop == sequence.num_tokens:
            if sequence.sampling is not None:
                samples = (sequence.sampling,)
            else:
                request = self._requests[sequence.request_id]
                samples = tuple(self._limits.sample_row(sequence, choice) for choice in request.open_choices())
        return Chunk(sequence=sequence, start=sequence.num_computed, stop=stop, samples=samples)

    def _take_decoded(self, sequence: Sequence, result: SampleResult) -> None:
        if not sequence.block_table:  # it ended in the step before, or another choice failed earlier in this one
            return
        request = self._requests[sequence.request_id]
        self._blocks.advance(sequence, len(sequence.tokens))
        if isinstance(result, Sampled):
            self._take_token(request, sequence, result)
        else:
            self._fail(request, [result])

    def _take_chunk(self, chunk: Chunk, drawn: list[SampleResult]) -> None:
        request = self._requests.get(chunk.sequence.request_id)
        if request is None:
            return
        self._blocks.advance(chunk.sequence, chunk.stop)
        tokens = [result for result in drawn if isinstance(result, Sampled)]
        if len(tokens) < len(drawn):
            self._fail(request, drawn)
        elif request.phase is Phase.COMPUTING:
            self._take_prompt_chunk(request, tokens)
        elif tokens:
            self._take_token(request, chunk.sequence, tokens[0])

    def _take_prompt_chunk(self, request: Request, tokens: list[Sampled]) -> None:
        stem, request_id = request.stem, request.job.request_id
        self._log.progress.append(
            PrefillProgress(
                request_id=request_id,
                num_computed=stem.num_computed,
                num_prompt=stem.num_prompt,
                num_cached=request.num_cached,
            )
        )
        if stem.num_pending:
            return
        first_tokens = dict(enumerate(request.forced_first_tokens))
        if not first_tokens:
            sampled = dict(zip(request.open_choices(), tokens, strict=True))
            self._log.tokens[request_id] = [self._limits.choice_tokens(stem, *sample) for sample in sampled.items()]
            first_tokens = {choice: token.token_id for choice, token in sampled.items()}
        self._running.detach(stem)
        self._fork(request, first_tokens)

    def _take_token(self, request: Request, sequence: Sequence, sampled: Sampled) -> None:
        told = self._limits.choice_tokens(sequence, sequence.choice_index, sampled)
        self._log.tokens.setdefault(sequence.request_id, []).append(told)
        sequence.tokens.append(sampled.token_id)
        if told.finish_reason is not None:
            self._end(request, sequence)

    def _fail(self, request: Request, drawn: list[SampleResult]) -> None:
        reason = next(result.reason for result in drawn if isinstance(result, SampleFailure))
        error = PdserveError(f"Request {request.job.request_id} cannot go on: {reason}.")
        self._log.failures.append(Failure(request_id=request.job.request_id, error=error))
        self._drop(request)

    def _end(self, request: Request, sequence: Sequence) -> None:
        """One choice is over; with the last one, the request."""
        self._stop_running(sequence)
        del request.sequences[sequence.choice_index]
        self._stirred = True
        if not request.sequences:
            self._forget(request)

    def _stop_running(self, sequence: Sequence) -> None:
        self._running.detach(sequence)
        self._blocks.free(sequence)

    def _forget(self, request: Request) -> None:
        self._remove(request)
        self._log.finished.append(request.job.request_id)

    def _remove(self, request: Request) -> None:
        del self._requests[request.job.request_id]
        self._unstarted.pop(request.job.request_id, None)
        self._stirred = True

    def _drop(self, request: Request) -> None:
        """Free all that the request holds, in whatever phase."""
        if request.phase is Phase.WAITING:
            self._waiting.remove(request)
        if request.phase is Phase.RESERVED:
            self._end_reservation(request)
            self._blocks.free(request.stem)
        for sequence in request.sequences.values():
            self._stop_running(sequence)
        self._remove(request)
