"""One prompt's way through the cluster, from the choice of workers to its last token, including recovery.

    a prefill worker scores the prompt, if the client wants that           SCORING
    or pools it, and that is all                                           PREFILLING
    choose a decode worker D, open the call                                QUEUED
      D prefills locally (few tokens are uncached)                         RESERVED -> DECODING
      or D grants a ticket                                                 RESERVED
        choose a prefill worker P, which prefills with the ticket          PREFILLING
          P sends the first tokens, its progress keeps D's lease
          P lost: a renewed ticket and another P, else D prefills          RETRYING -> RESERVED ...
        P has committed, D decodes                                         DECODING
      D lost: another D goes on behind the tokens that the client has      RETRYING -> RESERVED ...
      no D is ready: a pause

`recovery` decides what follows a failure, `quarantine` how many workers a request may lose, and the journal records
every step.
"""

from __future__ import annotations

import asyncio
import contextlib
import random

from pdserve.base.errors import Draining, NoWorkers, PdserveError, RequestError, TransferError
from pdserve.base.registry import RECORD_TTL_S
from pdserve.base.workers import WorkerRecord
from router_svc.request.calls import DecodeFailed, is_reported
from router_svc.request.context import RequestContext
from router_svc.request.decode_start import decode_start
from router_svc.request.embedding import Embedding
from router_svc.request.error_for_client import error_for_client
from router_svc.request.migrating_run import MigratingRun
from router_svc.request.prefill_attempt import prefill
from router_svc.request.quarantine import Deaths
from router_svc.request.recovery import MAX_BROKEN, Failure, NextStep, after_decode_failure, backoff_s, failure_of
from router_svc.request.scoring import Scoring
from router_svc.routing.home import Home, home_of
from router_svc.routing.incarnation import Incarnation, incarnation_of
from router_svc.routing.local_prefill import PrefillPlan, plan_by_length, plan_by_load, plan_without_prefill
from router_svc.routing.placement import Placement

#: Interval between retries while all decode workers are full: about one heartbeat.
_CAPACITY_RETRY_S = 0.5
#: A worker that has started anew, and refuses what is for the one before, has its new record by then.
_RECORD_S = 2.0
#: The record of a worker whose heartbeats have ended has expired by then.
_GONE_S = RECORD_TTL_S
#: A worker that was lost and is started again is ready by then, as a rule.
_CLASS_RETURN_S = 3.0


class Saga:
    """Runs one prompt to its end."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._cluster = context.cluster
        self._policy = context.cluster.policy
        self._journal = context.journal
        self._placer = context.placer
        self._output = context.output
        #: Decode workers that get no further attempt for now, and those that get one only where there is no other.
        self._failed_decode: set[Incarnation] = set()
        self._avoided_decode: set[Incarnation] = set()
        self._met_decode: set[Incarnation] = set()
        #: When each has refused the request as a stranger's, since the last token; and whether all of them do.
        self._refused_at, self._is_stranger = dict[Incarnation, float](), False
        #: Since the last new token: failures of any kind, and decode workers that broke in the request.
        self._failures = 0
        self._broken = 0
        self._tokens_at_failure = 0
        self._answers_at_failure = 0
        #: Until then, the request tries workers that cannot be reached, and waits for one that suits it.
        self._patient_until = 0.0
        #: Until then, the request waits for workers that are full.
        self._until_capacity = 0.0
        #: Until then, an answer that has begun waits for a worker of its numerics class, even if another one is ready.
        self._same_class_until = 0.0
        #: KV layout and numerics class of the last decode worker that has added tokens.
        self._home = Home() if context.log is None else context.log.home

    async def run(self) -> None:
        """Returns when every choice is complete. Raises the error for the client."""
        generation = self._context.generation
        if generation.pooling is not None:
            await Embedding(self._context, self._heartbeat).run()
        elif generation.prompt_logprobs is not None:
            await Scoring(self._context, self._heartbeat).run()
        if not generation.sampling.max_tokens:
            self._context.deliver_ends()
            return
        await self._placer.look_up(self._context.hashes)
        if generation.sampling.max_tokens == 1 and await self._run_on_prefill_alone():
            return
        await self._run_with_decode()

    async def _run_on_prefill_alone(self) -> bool:
        """Runs a request for a single token without a decode worker. False if no prefill worker could."""
        while (placement := self._placer.choose_prefill(None)) is not None:
            try:
                await prefill(self._context, placement, None, None)
                return True
            except RequestError:
                raise
            except PdserveError as error:
                await self._context.note_failure(placement.worker, error)
                self._context.prefill_failed(placement, error)
                if not self._placer.deaths.may_reach("decode") and self._placer.choose_prefill(None) is None:
                    raise
        return False

    async def _run_with_decode(self) -> None:
        self._until_capacity = self._now() + self._policy.reserve_timeout_s
        self._patient_until = self._now() + self._policy.worker_return_timeout_s
        refusal: PdserveError = NoWorkers(self._cluster.policy.no_decode_worker)
        is_full = False
        while True:
            placement = self._choose_decode() or await self._wait_for_decode(
                self._until_capacity if is_full else None, refusal
            )
            if not self._deaths.may_reach("decode"):
                await self._wait_for_prefill(placement.worker, refusal)
            run = MigratingRun(self._context, placement)
            try:
                await self._run_on(run)
                return
            except DecodeFailed as failed:
                refusal, worker = failed.error, failed.worker
            placement = run.placement
            if incarnation_of(worker) == placement.incarnation:  # That of a prefill worker is noted already.
                await self._context.note_failure(worker, refusal)
            failure = self._failure_of(placement, worker, refusal)
            if isinstance(refusal, RequestError) and self._output.has_tokens:
                # The client has sent nothing wrong: a worker has accepted the request before.
                refusal = TransferError(f"Worker {worker.worker_id} refused to go on with the answer: {refusal}")
            self._note(failure, placement.incarnation)
            if self._next_step(failure) is NextStep.FAIL:
                # What two workers that live have broken in, a third will not do.
                is_final = failure is Failure.REQUEST or self._broken > MAX_BROKEN or self._is_stranger
                raise refusal if is_final else error_for_client(refusal, self._context, self._home)
            self._journal.retry(refusal, worker)
            self._output.forget_early()
            # The prompt may be cached by now, and a worker that started anew has nothing.
            await self._placer.look_up(self._context.hashes)
            # A worker that drains is back soon, as one that is lost.
            is_full = failure is Failure.CAPACITY and not isinstance(refusal, Draining)
            if not is_full:  # Where all are full, `_wait_for_decode` is the pause.
                await asyncio.sleep(backoff_s(self._failures, self._context.generation.worker_request_id))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _failure_of(self, placement: Placement, worker: WorkerRecord, error: PdserveError) -> Failure:
        """`worker` is the one at fault, which may be a prefill worker."""
        failure = failure_of(error, is_reported=is_reported(error), is_continuation=self._output.has_tokens)
        if incarnation_of(worker) != placement.incarnation and failure is not Failure.REQUEST:
            failure = Failure.PREFILL
        if failure.excludes_worker:
            self._failed_decode.add(placement.incarnation)
        if failure.avoids_worker:
            self._avoided_decode.add(placement.incarnation)
        return failure

    def _note(self, failure: Failure, worker: Incarnation) -> None:
        """Counts a failure. New tokens, answers of workers, and workers that were not met before begin a new count."""
        tokens, answers = self._output.completion_tokens, self._context.decode_answers
        if tokens > self._tokens_at_failure:
            self._failures = self._broken = 0
            self._refused_at.clear()
            self._until_capacity = self._now() + self._policy.reserve_timeout_s
        if answers > self._answers_at_failure or worker not in self._met_decode:
            # A worker that cannot be reached may seem to be back each time: then one wait is all.
            self._met_decode.add(worker)
            self._patient_until = self._now() + self._policy.worker_return_timeout_s
        self._tokens_at_failure, self._answers_at_failure = tokens, answers
        self._failures += 1
        if self._failures == 1:
            self._same_class_until = self._now() + _CLASS_RETURN_S
        self._broken += failure is Failure.BROKEN
        if failure is Failure.REFUSED:
            waited_s = self._now() - self._refused_at.setdefault(worker, self._now())
            all_refuse = {*map(incarnation_of, self._cluster.ready("decode"))} <= self._refused_at.keys()
            self._is_stranger = all_refuse and waited_s >= _RECORD_S and not self._cluster.directory.degraded

    def _next_step(self, failure: Failure) -> NextStep:
        return after_decode_failure(
            failure,
            broken=self._broken,
            is_stranger=self._is_stranger,
            has_other_decode=self._choose_decode() is not None,
            is_patient=self._is_patient(),
        )

    def _is_patient(self) -> bool:
        return self._now() < self._patient_until

    @property
    def _deaths(self) -> Deaths:
        return self._placer.deaths

    def _choose_decode(self) -> Placement | None:
        # Another layout may be another model, which must not go on with tokens that the client has from this one.
        home = self._home if self._output.has_tokens else Home()
        avoided = self._failed_decode | self._avoided_decode
        waits_for_class = self._now() < min(self._same_class_until, self._patient_until)
        for numerics in home.choices(may_change=self._policy.may_change_numerics and not waits_for_class):
            for excluded in (avoided, self._failed_decode):
                placement = self._placer.choose("decode", excluded, home.layout, numerics)
                if placement is not None:
                    return placement
        return None

    async def _wait_for_decode(self, until_capacity: float | None, refusal: PdserveError) -> Placement:
        """A decode worker to ask again, after each heartbeat. Raises `refusal` when there is none to wait for.

        While all are full, that is at `until_capacity`. While the whole tier is gone, it is never: one was ready, or
        expected, when the request came. The request's own deadline ends it in any case. A heartbeat may bring a worker
        back, or capacity even where the reported load looks the same.
        """
        placement, waits, since = None, 0, self._now()
        while placement is None:
            if self._policy.worker_return_timeout_s > 0 and not self._cluster.ready("decode"):
                until_capacity = None
                if self._now() - since >= _GONE_S:  # A worker seen now was restarted: its time starts anew.
                    self._patient_until = self._now() + self._policy.worker_return_timeout_s
                    self._until_capacity = self._now() + self._policy.reserve_timeout_s
            elif self._now() >= (self._patient_until if until_capacity is None else until_capacity):
                raise error_for_client(refusal, self._context, self._home)
            waits += 1
            await self._heartbeat(waits, until_capacity)
            self._failed_decode.clear()
            placement = self._choose_decode()
        return placement

    async def _wait_for_prefill(self, decode: WorkerRecord, refusal: PdserveError) -> None:
        """For a request that only prefill workers may compute: returns when one is ready.

        Raises `refusal` when none is expected, or all that are ready have failed the request.
        """
        waits, is_expected = 0, self._cluster.expects("prefill")
        while self._placer.choose_prefill(decode) is None:
            if self._cluster.ready("prefill", decode.layout) or not is_expected:
                raise refusal
            waits += 1
            await self._heartbeat(waits)

    async def _heartbeat(self, waits: int, until: float | None = None) -> None:
        """Returns with the next change of the workers, or after about one heartbeat."""
        key = f"{self._context.generation.worker_request_id}/{waits}"
        when = self._now() + _CAPACITY_RETRY_S * random.Random(key).uniform(0.75, 1.25)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(when if until is None else min(when, until)):
                await self._cluster.directory.wait_for_change(self._cluster.directory.version)

    async def _run_on(self, run: MigratingRun) -> None:
        """The request on one decode worker, and where it moves. Raises `DecodeFailed`, or an error for the client."""
        context, placement, worker = self._context, run.placement, run.placement.worker
        if self._output.has_tokens and self._home.numerics_class not in (None, worker.numerics_class):
            self._journal.changed_numerics(str(self._home.numerics_class), worker)
        num_tokens = self._output.completion_tokens
        remote = self._placer.choose_prefill(worker)
        plan = self._plan_prefill(placement, remote)
        trace = self._journal.chose_decode(placement, plan)
        start = decode_start(context, plan.threshold, trace)
        with contextlib.ExitStack() as counted:
            # Other requests see the prompt's tokens in the queue of the worker that will probably compute them.
            computing = placement if placement.uncached_tokens <= plan.threshold else remote
            if computing is not None:
                counted.enter_context(
                    context.prompt.assigned(computing.worker, computing.uncached_tokens, is_sent=False)
                )
            try:
                await run.run(start)
            finally:
                if self._output.completion_tokens > num_tokens:  # Else the tokens are those of an earlier worker.
                    self._home = home_of(run.placement.worker)

    def _plan_prefill(self, decode: Placement, remote: Placement | None) -> PrefillPlan:
        """Where the prompt should be prefilled: on the decode worker or on `remote`, a prefill worker."""
        if self._deaths.tier is not None:
            return plan_by_length(0)
        if not self._cluster.ready("prefill", decode.worker.layout):
            return plan_without_prefill(
                expects_prefill=self._policy.expects_prefill, has_other_layouts=bool(self._cluster.ready("prefill"))
            )
        if remote is None or not self._policy.local_prefill_by_load:
            return plan_by_length(self._policy.local_prefill_threshold)
        return plan_by_load(self._policy.local_prefill_threshold, decode, remote, self._cluster.in_flight)
