"""One request on one decode worker, until every choice is complete.

Two tasks run concurrently: `_relay` reads the worker's events to the end, and `_hand_over` gets the prompt's KV to the
worker. Leaving the block that holds them ends both, and leaving a call's block frees the blocks on its worker. A client
that disconnects therefore needs no code here.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

from pdserve.base.errors import NoFreeBlocks, NoWorkers, PdserveError, TransferError, TransferTimeout, reason_of
from pdserve.peers.seals import Purpose
from pdserve.peers.workers import WorkerRecord
from pdserve.v1 import decode_pb2
from router_svc.records.events import BlocksReserved, DecodeStarted, FellBack, FirstDecoded, LocalPrefillOrdered
from router_svc.request.calls import DecodeCall, DecodeFailed, is_reported
from router_svc.request.failure import failure_of
from router_svc.request.prefill_attempt import prefill
from router_svc.request.recovery import NextStep, after_prefill_failure
from router_svc.request.running_prompt import RunningPrompt
from router_svc.routing.placement import Placement

#: Time that a complete output waits for the report of its transfer, in seconds.
_REPORT_TIMEOUT_S = 0.1


class DecodeAttempt:
    """Runs a request through one `DecodeCall`."""

    def __init__(self, prompt: RunningPrompt, call: DecodeCall) -> None:
        self._prompt = prompt
        self._call = call
        self._journal = prompt.journal
        self._placer = prompt.placer
        self._output = prompt.output
        self._delivery = prompt.delivery
        self._losses = prompt.losses
        self._queued = prompt.queued
        self._policy = prompt.cluster.policy
        self._prompt_tokens = len(prompt.generation.prompt)
        self._has_decoded = False

    async def run(self, start: decode_pb2.DecodeStart) -> None:
        """Returns when every choice is complete. Raises `DecodeFailed`, or an error for the client."""
        sealed = self._prompt.cluster.sealed(Purpose.START, self._call.worker, start)
        await self._call.send(decode_pb2.DecodeRequest(start=sealed))
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                handover = tasks.create_task(self._hand_over())
                relay = tasks.create_task(self._relay(handover))
                await self._delivery.finished.wait()
                relay.cancel()
                if self._call.has_started:
                    # A short output can be complete before the prefill worker knows that its transfer is committed.
                    await asyncio.wait((handover,), timeout=_REPORT_TIMEOUT_S)
                handover.cancel()
        except* (DecodeFailed, PdserveError) as errors:
            # Both tasks may have seen the same failure; the first error explains it.
            failure = errors.exceptions[0]
        # Raised out here: before Python 3.11.4, `except*` makes a group of what is raised in it.
        if failure is not None and not self._delivery.finished.is_set():
            raise failure

    async def _relay(self, handover: asyncio.Task[None]) -> None:
        """Reads the decode worker's events until every choice is complete, or until it has ended the stream."""
        worker = self._call.worker
        with ExitStack() as local_prefill:
            while not self._output.is_finished:
                event = await self._call.next_event(self._policy.silence)
                match event.WhichOneof("event"):
                    case "ticket":
                        self._losses.answered(worker)
                        reserved = BlocksReserved(worker=worker.worker_id, reserve_s=event.ticket.reserve_s)
                        self._journal.append(reserved)
                    case "started":
                        self._losses.answered(worker)
                        self._journal.append(DecodeStarted.of(event.started, worker))
                        if event.started.prefilled_locally:
                            uncached = max(self._prompt_tokens - event.started.cached_tokens, 0)
                            local_prefill.enter_context(self._queued.assigned(worker, uncached))
                    case "progress":
                        self._queued.update(max(self._prompt_tokens - event.progress.computed_tokens, 0))
                    case "ended":
                        await self._end(handover)
                        return
                    case "tokens":
                        if not self._has_decoded:
                            self._has_decoded = True
                            self._journal.append(FirstDecoded())
                        self._queued.mark_computed()
                        await self._delivery.tokens(event.tokens.choices, self._call)

    async def _end(self, handover: asyncio.Task[None]) -> None:
        """The decode worker has sent all of its tokens: only the prefill worker may still have some."""
        await asyncio.wait((handover,))
        if not self._output.is_finished and not handover.cancelled() and handover.exception() is None:
            worker = self._call.worker
            error = TransferError(
                f"Decode worker {worker.worker_id} ended the stream before every choice was complete."
            )
            raise DecodeFailed(error, worker)

    async def _opened(self) -> decode_pb2.DecodeResponse:
        """The ticket, or the start of a request that needs none. Raises `NoFreeBlocks` when neither comes in time."""
        return await self._call.milestone(
            self._policy.reserve_timeout_s,
            NoFreeBlocks(
                f"Decode worker {self._call.worker.worker_id} had no free blocks for the request within "
                f"{self._policy.reserve_timeout_s:g} s."
            ),
        )

    async def _hand_over(self) -> None:
        """Gets the prompt's KV to the decode worker: from a prefill worker, else by local prefill."""
        opened = await self._opened()
        reason = "quarantine" if self._placer.deaths.tier == "decode" else "no_prefill_worker"
        failed_prefill: WorkerRecord | None = None
        while opened.HasField("ticket"):
            # The plan has served its purpose, and must not count against the worker it favoured.
            self._queued.unassign()
            must_ask = not opened.ticket.ticket.data_address
            placement = self._placer.choose_prefill(self._call.worker, must_ask=must_ask)
            if placement is None:
                await self._prefill_on_decode(reason, failed_prefill)
                return
            try:
                await prefill(self._prompt, placement, opened.ticket.ticket, self._call)
                await self._started()
                return
            except PdserveError as failed:
                error = failed
            await self._losses.note(placement.worker, error)
            failed_prefill = placement.worker
            match self._next_step(placement, error, must_ask=must_ask):
                case NextStep.CARRY_ON:
                    return
                case NextStep.FAIL:
                    raise error
                case NextStep.FAIL_ATTEMPT:
                    self._placer.exclude_prefill(placement, error)
                    raise DecodeFailed(error, placement.worker) from error
                case NextStep.RENEW_TICKET:
                    self._losses.prefill_failed(placement, error)
                    opened, reason = await self._renew_ticket(), reason_of(error)
                case NextStep.PREFILL_LOCALLY:
                    self._losses.prefill_failed(placement, error)
                    await self._prefill_on_decode(reason_of(error), failed_prefill)
                    return
        self._require_first_tokens(opened, failed_prefill)

    def _next_step(self, placement: Placement, error: PdserveError, *, must_ask: bool) -> NextStep:
        return after_prefill_failure(
            failure_of(error, is_reported=is_reported(error), is_continuation=self._output.has_tokens),
            has_first_tokens=self._output.has_first_tokens,
            decode_has_started=self._call.has_started,
            has_other_prefill=self._placer.has_other_prefill(placement, error, self._call.worker, must_ask=must_ask),
            may_prefill_on_decode=self._placer.deaths.may_reach("decode"),
        )

    async def _started(self) -> decode_pb2.DecodeResponse:
        """Returns when the decode worker has started to decode."""
        worker, timeout_s = self._call.worker, self._policy.silence.of_start(self._call.worker)
        return await self._call.milestone(
            timeout_s,
            TransferTimeout(f"Decode worker {worker.worker_id} did not start to decode within {timeout_s} s."),
        )

    async def _renew_ticket(self) -> decode_pb2.DecodeResponse:
        """A ticket for the new attempt, or the start, if the previous attempt had been committed after all."""
        attempt = self._journal.record.attempt
        renewal = decode_pb2.RenewTicket(attempt=attempt)
        await self._call.send(decode_pb2.DecodeRequest(renew_ticket=renewal))
        while True:
            opened = await self._call.milestone(
                self._policy.reserve_timeout_s,
                TransferTimeout(
                    f"Decode worker {self._call.worker.worker_id} did not renew the ticket within "
                    f"{self._policy.reserve_timeout_s:g} s."
                ),
            )
            if not opened.HasField("ticket") or opened.ticket.ticket.attempt == attempt:
                return opened

    async def _prefill_on_decode(self, reason: str, failed_prefill: WorkerRecord | None) -> None:
        if not self._placer.deaths.may_reach("decode"):
            error = NoWorkers("No other prefill worker is ready. Retry in a few seconds.")
            raise DecodeFailed(error, failed_prefill or self._call.worker)
        worker = self._call.worker
        self._journal.append(LocalPrefillOrdered())
        self._journal.append(FellBack(reason=reason, worker=worker.worker_id))
        command = decode_pb2.PrefillLocally(
            attempt=self._journal.record.attempt, forced_first_tokens=self._output.first_tokens
        )
        # The worker reports with its start how many of these tokens it has cached.
        with self._queued.assigned(worker, self._prompt_tokens):
            await self._call.send(decode_pb2.DecodeRequest(prefill_locally=command))
            started = await self._started()
            if not started.started.prefilled_locally:
                # The previous attempt had been committed after all: there is nothing left to compute.
                self._queued.mark_computed()
        self._require_first_tokens(started, failed_prefill)

    def _require_first_tokens(self, started: decode_pb2.DecodeResponse, failed_prefill: WorkerRecord | None) -> None:
        """Fails the attempt if `failed_prefill` was lost between its commit and its first tokens.

        No other worker has these tokens, so the request would wait for them until it times out.
        """
        if not started.started.prefilled_locally and not self._output.has_first_tokens:
            worker = self._call.worker
            raise DecodeFailed(
                TransferError(f"The first tokens for {worker.worker_id} were lost with the prefill worker."),
                failed_prefill or worker,
            )
