"""One prompt's way through the cluster, from the choice of workers to its last token, including recovery.

    choose a decode worker D, open the call                                QUEUED
      D prefills locally (few tokens are uncached)                         RESERVED -> DECODING
      or D grants a ticket                                                 RESERVED
        choose a prefill worker P, which prefills with the ticket          PREFILLING
          P sends the first tokens, its progress keeps D's lease
          P lost: a renewed ticket and another P, else D prefills          RETRYING -> RESERVED ...
        P has committed, D decodes                                         DECODING
      D lost: another D goes on behind the tokens that the client has      RETRYING -> RESERVED ...
      no D is ready, and one is expected back: a pause

`recovery` decides what follows a failure, `quarantine` how many workers a request may lose, and the journal records
every step.
"""

from __future__ import annotations

import asyncio
import contextlib

from pdserve.base.errors import NoWorkers, PdserveError, RequestError
from pdserve.base.layout import KvLayout
from pdserve.base.tracing.context import traceparent_of
from pdserve.base.workers import WorkerRecord
from pdserve.v1 import decode_pb2
from router_svc.request.calls import DecodeFailed, decode_call, is_gone, is_reported
from router_svc.request.context import RequestContext
from router_svc.request.decode_attempt import DecodeAttempt
from router_svc.request.prefill_attempt import prefill
from router_svc.request.quarantine import Deaths
from router_svc.request.recovery import Failure, NextStep, after_decode_failure, failure_of
from router_svc.routing.incarnation import Incarnation, incarnation_of
from router_svc.routing.local_prefill import PrefillPlan, plan_by_length, plan_by_load, plan_without_prefill
from router_svc.routing.placement import Placement

#: Interval between retries while all decode workers are full: about one heartbeat.
_CAPACITY_RETRY_S = 0.5


class Saga:
    """Runs one prompt to its end."""

    def __init__(self, context: RequestContext) -> None:
        self._context = context
        self._cluster = context.cluster
        self._policy = context.cluster.policy
        self._journal = context.journal
        self._output = context.output
        self._failed_decode: set[Incarnation] = set()
        #: Decode workers that have failed the request without being lost.
        self._decode_failures = 0
        #: KV layout of the last decode worker, which its prefill workers have too.
        self._layout: KvLayout | None = None if context.log is None else context.log.layout

    async def run(self) -> None:
        """Returns when every choice is complete. Raises the error for the client."""
        generation = self._context.generation
        self._context.overlap = await self._cluster.overlap(self._context.hashes)
        if generation.sampling.max_tokens == 1 and await self._run_on_prefill_alone():
            return
        await self._run_with_decode()

    async def _run_on_prefill_alone(self) -> bool:
        """Runs a request for a single token without a decode worker. False if no prefill worker could."""
        while (placement := self._context.choose_prefill(None)) is not None:
            try:
                await prefill(self._context, placement, None, None)
                return True
            except RequestError:
                raise
            except PdserveError as error:
                await self._context.note_failure(placement.worker, error)
                self._context.prefill_failed(placement, error)
                if not self._context.deaths.may_reach("decode") and self._context.choose_prefill(None) is None:
                    raise
        return False

    async def _run_with_decode(self) -> None:
        until_capacity = self._deadline(self._policy.reserve_timeout_s)
        until_return = self._deadline(self._policy.worker_return_timeout_s)
        tokens_at_loss: int | None = None
        placement = self._choose_decode() or await self._wait_for_decode(
            until_return, NoWorkers("No decode worker is ready. Retry in a few seconds.")
        )
        while True:
            try:
                await self._run_on(placement)
                return
            except DecodeFailed as failed:
                error, worker = failed.error, failed.worker
            if incarnation_of(worker) == placement.incarnation:  # That of a prefill worker is noted already.
                await self._context.note_failure(worker, error)
            step = self._next_step(placement, worker, error)
            if step is NextStep.FAIL:
                raise error
            self._journal.retry(error, worker)
            self._output.forget_early()
            is_refusal = failure_of(error, is_reported=is_reported(error)) is Failure.CAPACITY
            # A worker can fail again and again and seem to be back each time: without a new token, one wait is all.
            if not is_refusal and tokens_at_loss != self._output.completion_tokens:
                tokens_at_loss = self._output.completion_tokens
                until_return = self._deadline(self._policy.worker_return_timeout_s)
            until = until_capacity if is_refusal else until_return
            placement = self._choose_decode() or await self._wait_for_decode(until, error)

    @staticmethod
    def _deadline(timeout_s: float) -> float:
        return asyncio.get_running_loop().time() + timeout_s

    def _next_step(self, placement: Placement, worker: WorkerRecord, error: PdserveError) -> NextStep:
        """`worker` is the one at fault, which may be a prefill worker."""
        failure = failure_of(error, is_reported=is_reported(error))
        if incarnation_of(worker) != placement.incarnation:
            failure = Failure.PREFILL
        if failure.excludes_worker:
            self._failed_decode.add(placement.incarnation)
        if failure.is_loss and not is_gone(error):
            self._decode_failures += 1
        return after_decode_failure(
            failure,
            failures=self._decode_failures,
            has_other_decode=self._choose_decode() is not None,
            is_expected=self._cluster.expects("decode"),
        )

    @property
    def _deaths(self) -> Deaths:
        return self._context.deaths

    def _choose_decode(self) -> Placement | None:
        # Another layout may be another model, which must not go on with tokens that the client has from this one.
        return self._context.choose("decode", self._failed_decode, self._layout if self._output.has_tokens else None)

    async def _wait_for_decode(self, deadline: float, refusal: PdserveError) -> Placement:
        """A decode worker to ask again, after each heartbeat until the deadline. Raises `refusal` then.

        A heartbeat may bring a worker back, or capacity even where the reported load looks the same.
        """
        placement = None
        while placement is None:
            version, now = self._cluster.directory.version, asyncio.get_running_loop().time()
            if now >= deadline:
                raise refusal
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(min(now + _CAPACITY_RETRY_S, deadline)):
                    await self._cluster.directory.wait_for_change(version)
            self._failed_decode.clear()
            placement = self._choose_decode()
        return placement

    async def _run_on(self, placement: Placement) -> None:
        """The request on one decode worker, until done. Raises `DecodeFailed`, or an error for the client."""
        context, worker = self._context, placement.worker
        self._layout = worker.layout
        remote = context.choose_prefill(worker.layout)
        plan = self._plan_prefill(placement, remote)
        trace = self._journal.chose_decode(placement, plan)
        start = decode_pb2.DecodeStart(
            ref=context.ref(),
            prompt_token_ids=context.generation.prompt,
            sampling=context.sampling,
            local_prefill_threshold=plan.threshold,
            cache_salt=context.generation.cache_salt,
            traceparent=traceparent_of(trace),
            output=[
                decode_pb2.ChoiceOutput(choice_index=each.choice_index, token_ids=each.token_ids, is_over=each.is_over)
                for each in self._output.continuation
            ],
        )
        with contextlib.ExitStack() as counted:
            # Other requests see the prompt's tokens in the queue of the worker that will probably compute them.
            computing = placement if placement.uncached_tokens <= plan.threshold else remote
            if computing is not None:
                counted.enter_context(
                    context.prompt.assigned(computing.worker, computing.uncached_tokens, is_sent=False)
                )
            counted.enter_context(self._cluster.in_flight.decoding(worker.worker_id, context.generation.sampling.n))
            async with decode_call(worker, self._cluster.streams) as call:
                await DecodeAttempt(context, call).run(start)

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
