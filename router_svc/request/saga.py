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
      D drains, is full or has more to do than others: the request moves
        another D follows it, then goes on alone                           DECODING
      D lost: another D goes on behind the tokens that the client has      RETRYING -> RESERVED ...
      no D is ready: a pause

`Recovery` decides what follows a failure, `Placer` which worker is next, `Losses` how many workers a request may lose,
and the journal records every step. `MigratingRun` has the steps on D, from the call on, and the moves.
"""

from __future__ import annotations

import asyncio
import contextlib

from pdserve.base.errors import NoWorkers, PdserveError, RequestError, TransferError
from pdserve.peers.workers import WorkerRecord
from router_svc.records.events import NumericsChanged, Retried, WorkerChosen
from router_svc.request.calls import DecodeFailed, is_reported
from router_svc.request.embedding import Embedding
from router_svc.request.error_for_client import error_for_client
from router_svc.request.failure import Failure, failure_of
from router_svc.request.migration.run import MigratingRun
from router_svc.request.prefill_attempt import prefill
from router_svc.request.recovery import NextStep, Patience, Progress, Recovery
from router_svc.request.running_prompt import RunningPrompt
from router_svc.request.scoring import Scoring
from router_svc.request.waiting import Waiting
from router_svc.routing.home import Home, home_of
from router_svc.routing.incarnation import incarnation_of
from router_svc.routing.local_prefill import PrefillPlan, plan_by_length, plan_by_load, plan_without_prefill
from router_svc.routing.placement import Placement


class Saga:
    """Runs one prompt to its end."""

    def __init__(self, prompt: RunningPrompt, home: Home) -> None:
        """`home`: where the tokens come from that the client has already."""
        self._prompt = prompt
        self._cluster = prompt.cluster
        self._policy = prompt.cluster.policy
        self._journal = prompt.journal
        self._placer = prompt.placer
        self._output = prompt.output
        self._losses = prompt.losses
        self._key = prompt.generation.worker_request_id
        patience = Patience(capacity_s=self._policy.reserve_timeout_s, return_s=self._policy.worker_return_timeout_s)
        self._recovery = Recovery(patience, home)
        self._waiting = Waiting(prompt.cluster, prompt.placer, self._recovery, self._key)

    async def run(self) -> None:
        """Returns when every choice is complete. Raises the error for the client."""
        generation = self._prompt.generation
        if generation.pooling is not None:
            await Embedding(self._prompt, self._waiting.heartbeat).run()
        elif generation.prompt_logprobs is not None:
            await Scoring(self._prompt, self._waiting.heartbeat).run()
        if not generation.sampling.max_tokens:
            self._prompt.delivery.ends()
            return
        await self._placer.look_up()
        if generation.sampling.max_tokens == 1 and await self._run_on_prefill_alone():
            return
        await self._run_with_decode()

    async def _run_on_prefill_alone(self) -> bool:
        """Runs a request for a single token without a decode worker. False if no prefill worker could."""
        while (placement := self._placer.choose_prefill(None)) is not None:
            try:
                await prefill(self._prompt, placement, None, None)
                return True
            except RequestError:
                raise
            except PdserveError as error:
                await self._losses.note(placement.worker, error)
                self._losses.prefill_failed(placement, error)
                if not self._placer.deaths.may_reach("decode") and self._placer.choose_prefill(None) is None:
                    raise
        return False

    async def _run_with_decode(self) -> None:
        recovery, now = self._recovery, self._waiting.now
        recovery.begin(now())
        refusal: PdserveError = NoWorkers(self._policy.no_decode_worker)
        while True:
            placement = self._placer.choose_decode(recovery, now()) or await self._waiting.for_decode(refusal)
            if not self._placer.deaths.may_reach("decode"):
                await self._waiting.for_prefill(placement.worker, refusal)
            run = MigratingRun(self._prompt, placement)
            try:
                await self._run_on(run)
                return
            except DecodeFailed as failed:
                refusal, worker = failed.error, failed.worker
            await self._note(run.placement, worker, refusal)
            if isinstance(refusal, RequestError) and self._output.has_tokens:
                # The client has sent nothing wrong: a worker has accepted the request before.
                refusal = TransferError(f"Worker {worker.worker_id} refused to go on with the answer: {refusal}")
            has_other = self._placer.choose_decode(recovery, now()) is not None
            if recovery.next_step(now(), has_other=has_other) is NextStep.FAIL:
                if recovery.is_final:
                    raise refusal
                raise error_for_client(refusal, self._cluster, self._placer, recovery.home)
            self._journal.append(Retried.of(refusal, worker))
            self._output.forget_early()
            # The prompt may be cached by now, and a worker that started anew has nothing.
            await self._placer.look_up()
            if (pause_s := recovery.pause_s(self._key)) is not None:
                await asyncio.sleep(pause_s)

    async def _note(self, placement: Placement, worker: WorkerRecord, error: PdserveError) -> None:
        """Takes note of a failure. `worker` is the one at fault, which may be a prefill worker."""
        failure = failure_of(error, is_reported=is_reported(error), is_continuation=self._output.has_tokens)
        if incarnation_of(worker) == placement.incarnation:
            await self._losses.note(worker, error)
        elif failure is not Failure.REQUEST:  # The prefill worker's failure is noted already.
            failure = Failure.PREFILL
        progress = Progress(self._output.completion_tokens, self._losses.decode_answers)
        is_known = not self._cluster.directory.degraded
        ready = [*map(incarnation_of, self._cluster.ready("decode"))] if is_known else None
        self._recovery.failed(failure, placement.incarnation, progress, self._waiting.now(), ready=ready)

    async def _run_on(self, run: MigratingRun) -> None:
        """The request on one decode worker, and where it moves. Raises `DecodeFailed`, or an error for the client."""
        placement, worker = run.placement, run.placement.worker
        numerics, remarks = self._recovery.home.numerics_class, [self._placer.deaths.remark]
        if numerics not in (None, worker.numerics_class):
            changed = NumericsChanged(before=str(numerics), after=worker.numerics_class, worker=worker.worker_id)
            self._journal.append(changed)
            remarks.append(changed.remark)
        num_tokens = self._output.completion_tokens
        remote = self._placer.choose_prefill(worker)
        plan = self._plan_prefill(placement, remote)
        trace = self._journal.append(WorkerChosen.of(placement, plan=plan, remark="; ".join(filter(None, remarks))))
        start = self._prompt.messages.decode(plan.threshold, trace)
        with contextlib.ExitStack() as counted:
            # Other requests see the prompt's tokens in the queue of the worker that will probably compute them.
            computing = placement if placement.uncached_tokens <= plan.threshold else remote
            if computing is not None:
                counted.enter_context(
                    self._prompt.queued.assigned(computing.worker, computing.uncached_tokens, is_sent=False)
                )
            try:
                await run.run(start)
            finally:
                if self._output.completion_tokens > num_tokens:  # Else the tokens are those of an earlier worker.
                    self._recovery.home = home_of(run.placement.worker)

    def _plan_prefill(self, decode: Placement, remote: Placement | None) -> PrefillPlan:
        """Where the prompt should be prefilled: on the decode worker or on `remote`, a prefill worker."""
        if self._placer.deaths.tier is not None:
            return plan_by_length(0)
        if not self._cluster.ready("prefill", decode.worker.layout):
            return plan_without_prefill(
                expects_prefill=self._policy.expects_prefill, has_other_layouts=bool(self._cluster.ready("prefill"))
            )
        if remote is None or not self._policy.local_prefill_by_load:
            return plan_by_length(self._policy.local_prefill_threshold)
        return plan_by_load(self._policy.local_prefill_threshold, decode, remote, self._cluster.in_flight)
