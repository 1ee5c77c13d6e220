"""Policy of the decode tier: reservations, continuous batching, local prefill in chunks, preemption by recompute. Pure.

    reserve -> WAITING --GRANT--> RESERVED --ACTIVATE--> RUNNING --FINISH | FAIL | ABORT--> OVER
                  |                   | COMPUTE             ^
                  '-----COMPUTE-------'---> COMPUTING --RUN-'

`TRANSITIONS` in request.py has every move. A RUNNING request has one sequence per choice. Each step computes pending
tokens of the sequences in the `RunningSet`: one token of a decoding sequence, or a chunk of a sequence without its KV.
Chunks keep the step within the ITL budget at the present pace. When a block is needed and none is free, the youngest
sequence is preempted. While a preempted sequence waits for blocks, no request is admitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items

from decode_svc.choices import fork_choices
from decode_svc.integrity import check_integrity
from decode_svc.load import decode_load
from decode_svc.migration.requests import MigratingRequests
from decode_svc.replication.replicas import Replicas
from decode_svc.request import DecodeJob, DecodeMove, DecodePhase, ScheduledRequest
from decode_svc.reservations import Reservations
from decode_svc.scheduler_config import DecodeSchedulerConfig
from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import RequestId
from pdserve.engine.block_manager import BlockManager
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.event_log import StepEventLog
from pdserve.engine.pace import Pace
from pdserve.engine.running import RunningSet
from pdserve.engine.sequence import DELAYED, Sampled, SampleDelayed, SampleFailure, SampleResult, Sequence
from pdserve.engine.step import Load, PrefillChunk, StepEvents, StepPlan


class DecodeScheduler:
    """Implements `pdserve.engine.scheduler.Scheduler`; every method is called on the step thread."""

    def __init__(self, pool: BlockPool, config: DecodeSchedulerConfig) -> None:
        self._blocks = BlockManager(pool)
        self._running = RunningSet(self._blocks, config.running_limits(pool))
        self._reservations = Reservations(self._blocks, config.reservation_limits(pool))
        self._limits, self._model_limits = config.limits_within(pool), config.limits
        #: All requests on this worker, in order of arrival.
        self._requests: dict[RequestId, ScheduledRequest] = {}
        #: Requests that come from other decode workers, or go there.
        self.migrating = MigratingRequests(self._requests, self._blocks, self._running, self._limits, self.blocks_freed)
        self.replicas = Replicas(self._requests, self._blocks, self.blocks_freed)
        #: Requests that may run, of which no step has computed anything yet.
        self._unstarted: dict[RequestId, ScheduledRequest] = {}
        self._events = StepEventLog(tier="decode")
        #: Whether blocks or capacity may be free, or demand has changed, since waiting requests were last looked at.
        self._must_rescan_waiting = False

    # Commands, between steps.
    def reserve(self, job: DecodeJob) -> None:
        """Queue a request for the blocks of its prompt and one more token; a `Grant` or `RequestStarted` follows.

        Raises `RequestError` for a prompt the model cannot take, `NoFreeBlocks` for one that this worker could never
        hold, `InvalidTransition` for a request id that is still here.
        """
        if job.request_id in self._requests:
            raise InvalidTransition(f"Request {job.request_id} is already on this worker.")
        job.require_servable(self._model_limits, self._blocks.pool, num_output_tokens=1)
        job.require_continuable(self._limits)
        self._requests[job.request_id] = request = ScheduledRequest.of(job)
        self._reservations.add(request)
        self._must_rescan_waiting = True

    def activate(self, request_id: RequestId, first_tokens: Items[int]) -> None:
        """The KV of the whole prompt is in the granted blocks, verified: run the choices from their first tokens on.

        The client has the first tokens from the prefill worker, so they are not reported again. Raises
        `InvalidTransition` unless the request is RESERVED, `RequestError` for impossible tokens.
        """
        request = self._expect(request_id, DecodeMove.ACTIVATE)
        self._limits.check_first_tokens(first_tokens, request.job.params)
        request.advance(DecodeMove.ACTIVATE)
        self._reservations.remove(request)
        self._must_rescan_waiting = True
        self._unstarted[request_id] = request
        if request.job.is_moving:
            self._take_choices(request, self.migrating.start(request))
        else:
            self._blocks.receive_prompt(request.prompt_sequence)
            self._run_choices(request, request.first_tokens(dict(enumerate(first_tokens))))

    def prefill_locally(self, request_id: RequestId, forced_first_tokens: Items[int] = ()) -> None:
        """Compute the missing part of the prompt here, then sample the first tokens or take those a client has seen.

        A RESERVED request must have no transfer in flight any more. Raises `InvalidTransition` once the KV is here or
        being computed, `RequestError` for impossible tokens.
        """
        request = self._expect(request_id, DecodeMove.COMPUTE)
        if forced_first_tokens:
            self._limits.check_first_tokens(forced_first_tokens, request.job.params)
        request.forced_first_tokens, request.locally = tuple(forced_first_tokens), True
        self._must_rescan_waiting = True
        if request.phase is DecodePhase.RESERVED:
            request.advance(DecodeMove.COMPUTE)
            self._reservations.remove(request)
            if not request.prompt_sequence.num_pending:
                self._blocks.recompute_last_token(request.prompt_sequence)
            self._compute_prompt(request)

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request in any phase and free its blocks; it has no more events. False when it is not here.

        A RESERVED request must have no transfer in flight any more.
        """
        if (request := self._requests.get(request_id)) is not None:
            self._finish(request, DecodeMove.ABORT)
            return True
        self._events.forget_finished(request_id)  # A command may have ended it, and no step has reported that.
        return False

    def stop_choice(self, request_id: RequestId, choice_index: int) -> None:
        """End one choice without reporting more of its tokens; the last one ends the request.

        An unknown request or choice is over already. A RESERVED request stays until its reservation has ended.
        """
        if (request := self._requests.get(request_id)) is None or not 0 <= choice_index < request.job.params.n:
            return
        request.stopped.add(choice_index)
        if request.phase is DecodePhase.RUNNING and (sequence := request.sequences.get(choice_index)) is not None:
            self._end_choice(request, sequence)
        elif len(request.stopped) == request.job.params.n and request.allows(DecodeMove.FINISH):
            self._finish(request, DecodeMove.FINISH)

    def blocks_freed(self) -> None:
        """A transfer, or another scheduler of the same pool, has freed blocks: look again at what waits."""
        self._must_rescan_waiting = True

    def has_work(self) -> bool:
        """Whether a step would compute or report anything."""
        num_waiting = self._reservations.num_waiting + self._running.num_preempted
        return self._running.num_active > 0 or bool(self._events) or (self._must_rescan_waiting and num_waiting > 0)

    def schedule(self, pace: Pace) -> StepPlan:
        """Resume preempted sequences, admit waiting requests, then plan the pending tokens of the active sequences."""
        self._must_rescan_waiting = False
        self._running.resume()
        self._admit_waiting()
        self._running.resume_best_effort(others_wait=self._reservations.others_wait)
        planned = self._running.plan(pace, is_awaiting=self._reservations.is_receiving)
        if planned.preempted:
            self._events.preempted.extend(self._requests[each.request_id].attempt_id for each in planned.preempted)
            self._must_rescan_waiting = True
        plan = StepPlan(
            decoding=planned.decoding,
            chunks=tuple(self._requests[s.request_id].chunk(s, stop, self._limits) for s, stop in planned.chunks),
            copies=self._blocks.pool.drain_copies(),
        )
        for sequence in plan.scheduled() if self._unstarted else ():
            if (request := self._unstarted.pop(sequence.request_id, None)) is not None:
                self._events.started.append(request.started(self._blocks.prompt_blocks(sequence)))
        return plan

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """A plan for the same sequences, or None. Requests that wait get no block before a running one ends."""
        if self._must_rescan_waiting or plan.chunks or not all(map(self._limits.can_run_ahead, plan.decoding)):
            return None
        if not plan.decoding or not self._running.extend_ahead(plan.decoding):
            return None
        copies = self._blocks.pool.drain_copies()
        assert not copies, "only prompts are shared: a step behind one that decodes never enters a shared block"
        return StepPlan(decoding=plan.decoding, is_ahead=True)

    def update(self, plan: StepPlan, sampled: Items[SampleResult]) -> StepEvents:
        """Take in what was computed, report new tokens, end what is complete."""
        for sequence, result in zip(plan.decoding, sampled, strict=False):
            self._take_decoded(sequence, result)
        results = iter(sampled[len(plan.decoding) :])
        for chunk in plan.chunks:
            self._take_chunk(chunk, [next(results) for _ in chunk.samples])
        return self._events.drain(self._blocks.pool.drain_events())

    def fail(self, request_id: RequestId, failure: SampleFailure) -> None:
        """End a request of the present plan, and report why."""
        self._events.fail(self._requests[request_id].attempt_id, failure)
        self._finish(self._requests[request_id], DecodeMove.FAIL)

    def load(self) -> Load:
        """The present load."""
        return decode_load(self._requests.values(), self._reservations, self._running, self._blocks)

    def check_integrity(self) -> None:
        """Assert that pool, queues and counters are sound, and that requests and transfers hold all references."""
        transfers = [*self.migrating.held, *self.replicas.held]
        check_integrity(self._requests.values(), self._reservations, self._running, transfers, self._blocks.pool)

    def _expect(self, request_id: RequestId, move: DecodeMove) -> ScheduledRequest:
        if (request := self._requests.get(request_id)) is None:
            raise InvalidTransition(f"Request {request_id} is not on this worker.")
        request.require(move)
        return request

    def _admit_waiting(self) -> None:
        """Admit requests in order while their blocks can be had and no preempted sequence waits for blocks.

        A block stays free for each active sequence, so that a new request does not cause a preemption at once.
        """
        running, waiting = self._running, self._reservations
        while (request := waiting.next) and (room := running.room_for(request.job)) and waiting.admit(request, room):
            if request.phase is DecodePhase.COMPUTING:
                self._compute_prompt(request)
            else:
                self._events.grants.append(request.granted(self._blocks))

    def _compute_prompt(self, request: ScheduledRequest) -> None:
        request.start_computing(self._running.next_admission_order())
        self._unstarted[request.request_id] = request
        if sequences := self.migrating.resume(request):
            self._take_choices(request, sequences)
        else:
            self._running.add(request.prompt_sequence)

    def _run_choices(self, request: ScheduledRequest, first_tokens: Mapping[int, int]) -> None:
        """Run every choice from its first token on, apart from those that end with it or were stopped."""
        prompt = request.prompt_sequence
        prompt.admission_order = prompt.admission_order or self._running.next_admission_order()
        sequences = fork_choices(request, first_tokens, self._limits, self._blocks)
        for sequence in sequences:
            self._running.add(sequence)
        self._take_choices(request, sequences)

    def _take_choices(self, request: ScheduledRequest, sequences: Items[Sequence]) -> None:
        """Makes `sequences` the running ones of the request. Without any sequence, the request is over."""
        request.sequences = {sequence.choice_index: sequence for sequence in sequences}
        if not sequences:
            self._finish(request, DecodeMove.FINISH)

    def _end_choice(self, request: ScheduledRequest, sequence: Sequence) -> None:
        """Free one choice; with the last one, the request is finished."""
        self._running.detach(sequence)
        self._blocks.free(sequence)
        del request.sequences[sequence.choice_index]
        self._must_rescan_waiting = True
        if not request.sequences:
            self._finish(request, DecodeMove.FINISH)

    def _finish(self, request: ScheduledRequest, outcome: DecodeMove) -> None:
        """End a request in whatever phase it is, and free all that it holds. Every request ends here."""
        request.advance(outcome)
        assert request.phase is DecodePhase.OVER, f"{outcome} does not end a request"
        del self._requests[request.request_id]
        self.replicas.forget(request.attempt_id)
        self._unstarted.pop(request.request_id, None)
        self._reservations.remove(request)
        for sequence in request.sequences.values():
            self._running.detach(sequence)
            self._blocks.free(sequence)
        # `sequences` lacks the prompt's sequence while RESERVED, and when no choice goes on after its first token.
        self._blocks.free(request.prompt_sequence)
        self._must_rescan_waiting = True
        if outcome is DecodeMove.FINISH:
            self._events.finished.append(request.attempt_id)

    def _take_decoded(self, sequence: Sequence, result: SampleResult) -> None:
        if not sequence.block_table or isinstance(result, SampleDelayed):
            return  # It ended in the step before, another choice failed earlier in this one, or its row comes again.
        self._blocks.advance(sequence, len(sequence.tokens))
        if isinstance(result, Sampled):
            self._take_token(self._requests[sequence.request_id], sequence, result)
        else:
            self.fail(sequence.request_id, result)

    def _take_chunk(self, chunk: PrefillChunk, results: list[SampleResult]) -> None:
        if (request := self._requests.get(chunk.sequence.request_id)) is None:
            return
        is_delayed = DELAYED in results  # All that is sampled from its last token comes again.
        self._blocks.advance(chunk.sequence, max(chunk.sequence.num_computed, chunk.stop - is_delayed))
        tokens = [] if is_delayed else [result for result in results if isinstance(result, Sampled)]
        if failures := [result for result in results if isinstance(result, SampleFailure)]:
            self.fail(request.request_id, failures[0])
        elif request.phase is DecodePhase.COMPUTING:
            self._take_prompt_chunk(request, tokens)
        elif tokens:
            self._take_token(request, chunk.sequence, tokens[0])

    def _take_prompt_chunk(self, request: ScheduledRequest, tokens: list[Sampled]) -> None:
        prompt = request.prompt_sequence
        self._events.progress.append(request.progress())
        if prompt.num_pending:
            return
        first_tokens = dict(enumerate(request.forced_first_tokens))
        if sampled := dict(zip(request.sampled_choices(), tokens, strict=True)):
            reported = [self._limits.choice_tokens(prompt, choice, token) for choice, token in sampled.items()]
            self._events.tokens[request.attempt_id] = reported
            first_tokens = {choice: token.token_id for choice, token in sampled.items()}
        self._running.detach(prompt)
        request.advance(DecodeMove.RUN)
        self._run_choices(request, request.first_tokens(first_tokens))

    def _take_token(self, request: ScheduledRequest, sequence: Sequence, sampled: Sampled) -> None:
        tokens = self._limits.take(sequence, sampled)
        self._events.tokens.setdefault(request.attempt_id, []).append(tokens)
        if tokens.finish_reason is not None:
            self._end_choice(request, sequence)
