"""One request's way through the cluster, from the choice of workers to its last token, with every failure on the way.

    place on a decode worker D, open D.Decode                              QUEUED
      D prefills by itself (little is uncached)                            RESERVED -> DECODING
      or D grants a ticket                                                 RESERVED
        place on a prefill worker P, run P.Prefill with the ticket         PREFILLING
          first tokens come from P, progress keeps D's lease
          P lost: a fresh ticket and another P, else D prefills            RETRYING -> RESERVED ...
        P has committed, D decodes                                         DECODING
      D lost: once more on another D, if no client saw D's tokens          RETRYING -> RESERVED ...

Two things happen at a time while a request is on D: `_relay` reads D's events to the end, `_hand_over` brings the
prompt's KV there. Leaving the block that holds them ends both, and leaving a call's block frees what its worker held,
so a client that goes away needs no code of its own here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence

from pdserve.base.errors import (
    CapacityError,
    NoFreeBlocks,
    NoWorkers,
    PdserveError,
    PeerLost,
    RequestError,
    TransferError,
    TransferTimeout,
    reason_of,
)
from pdserve.base.ids import WorkerId
from pdserve.base.wire import sampling_to_wire, tokens_from_wire
from pdserve.base.workers import Tier
from pdserve.v1 import common_pb2, decode_pb2, prefill_pb2
from router_svc.generation import Generation
from router_svc.records.journal import Journal
from router_svc.records.record import Record
from router_svc.records.request_state import RequestState
from router_svc.request.calls import is_reported, prefill_call
from router_svc.request.output import ChoiceDelta, Output, ended_by_stop_string
from router_svc.request.reservation import DecodeFailed, Reservation, reserving
from router_svc.routing.cluster import Cluster
from router_svc.routing.local_prefill import ALWAYS_LOCAL, LocalPrefillReason, PrefillPlan, plan_by_length, plan_by_load
from router_svc.routing.placement import Incarnation, Need, Placement, QueuedPrompt, choose_decode, choose_prefill

#: Decode workers that may be lost under one request: one that kills its workers must not go through all of them.
_MAX_DECODE_LOSSES = 1
#: As much for prefill workers; after that the decode worker prefills.
_MAX_PREFILL_FAILURES = 2
#: Of a ticket's lease, how long a prefill worker may be silent: what follows must reach the decode worker in the rest.
_SILENCE_SHARE = 0.75
#: How often workers that were all full are asked again: about once a heartbeat.
_ROOM_RETRY_S = 0.5


class _AllDone(Exception):
    """Every choice is complete while the decode worker has not begun. Never leaves this module."""


class Saga:
    """Runs one generation. Everything it decides goes into the record, every delta to `emit`.

    Both tiers may have tokens at the same moment: `emit` keeps the order of its calls.
    """

    def __init__(
        self,
        generation: Generation,
        cluster: Cluster,
        record: Record,
        output: Output,
        emit: Callable[[list[ChoiceDelta]], Awaitable[None]],
    ) -> None:
        self._generation = generation
        self._cluster = cluster
        self._policy = cluster.policy
        self._journal = Journal(record, cluster)
        self._record = record
        self._output = output
        self._emit = emit
        self._sampling = sampling_to_wire(generation.sampling)
        self._overlap: dict[WorkerId, int] = {}
        self._queued = QueuedPrompt(cluster.in_flight)
        self._failed_prefill: set[Incarnation] = set()

    async def run(self) -> None:
        """Returns when every choice is complete. Raises the error that the client has to hear."""
        self._overlap = await self._cluster.overlap(self._generation.prompt, self._generation.cache_salt)
        if self._generation.sampling.max_tokens == 1 and await self._prefill_is_enough():
            return
        await self._run_with_decode()

    # -- decode workers

    async def _run_with_decode(self) -> None:
        excluded: set[Incarnation] = set()
        losses = 0
        refusal: CapacityError | None = None
        deadline = asyncio.get_running_loop().time() + self._policy.reserve_timeout_s
        while True:
            version = self._cluster.directory.version
            placement = self._place("decode", excluded)
            if placement is None:
                if refusal is None:
                    raise NoWorkers("No decode worker is ready. Try again in a few seconds.")
                await self._wait_for_room(version, deadline, refusal)
                excluded.clear()
                continue
            try:
                await self._run_on(placement)
                return
            except DecodeFailed as failure:
                error = failure.error
            if not (isinstance(error, TransferError) and is_reported(error)):
                # A worker that tells of a failed transfer (its lease ran out) is well and may have the request again.
                excluded.add(placement.incarnation)
            self._journal.failed_on(placement.worker, error)
            if isinstance(error, CapacityError) and not self._output.has_started:
                refusal = error
            else:
                losses += 1
                if losses > _MAX_DECODE_LOSSES or not self._may_move_on(error, excluded):
                    raise error
            self._journal.retry(error, placement.worker)
            self._output.forget_early()

    def _may_move_on(self, error: PdserveError, excluded: Collection[Incarnation]) -> bool:
        """Whether another decode worker may take the request over without the client noticing."""
        if isinstance(error, RequestError) or self._output.is_past_first_tokens:
            return False
        if self._output.has_started and not (self._output.has_first_tokens and self._cluster.ready("prefill")):
            # Only a prefill worker can be told which first tokens the client has.
            return False
        return self._place("decode", excluded) is not None

    async def _wait_for_room(self, version: int, deadline: float, refusal: CapacityError) -> None:
        """All decode workers refused for lack of room: each heartbeat may bring some, also one that looks the same."""
        now = asyncio.get_running_loop().time()
        if now >= deadline:
            raise refusal
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(now + _ROOM_RETRY_S, deadline)):
                await self._cluster.directory.wait_for_change(version)

    async def _run_on(self, placement: Placement) -> None:
        """The request on one decode worker, until done. Raises `DecodeFailed`, or an error for the client."""
        worker = placement.worker
        plan = self._plan_prefill(placement)
        self._journal.chose_decode(placement, plan)
        if plan.reason is LocalPrefillReason.FALLBACK:
            self._journal.fall_back("no_prefill_worker", worker)
        start = decode_pb2.DecodeStart(
            ref=self._ref(),
            prompt_token_ids=self._generation.prompt,
            sampling=self._sampling,
            local_prefill_threshold=plan.threshold,
            cache_salt=self._generation.cache_salt,
        )
        with self._queued, self._cluster.in_flight.decoding(worker.worker_id, self._generation.sampling.n):
            async with reserving(worker) as reservation:
                await reservation.send(decode_pb2.DecodeRequest(start=start))
                try:
                    async with asyncio.TaskGroup() as tasks:
                        handover = tasks.create_task(self._hand_over(reservation))
                        await self._relay(reservation)
                        handover.cancel()
                except* _AllDone:
                    pass
                except* (DecodeFailed, PdserveError) as errors:
                    # Both sides may have met the same failure; the first one explains it.
                    raise errors.exceptions[0] from None

    def _plan_prefill(self, decode: Placement) -> PrefillPlan:
        """Which way the prompt is to go. From now on it is in the way of others there."""
        prefill = self._place("prefill", self._failed_prefill)
        if self._output.has_started:
            plan = plan_by_length(0)
        elif not self._cluster.ready("prefill"):
            is_meant = not self._policy.expects_prefill
            reason = LocalPrefillReason.NO_PREFILL_TIER if is_meant else LocalPrefillReason.FALLBACK
            plan = PrefillPlan(threshold=ALWAYS_LOCAL, reason=reason)
        elif prefill is None or not self._policy.local_prefill_by_load:
            plan = plan_by_length(self._policy.local_prefill_threshold)
        else:
            plan = plan_by_load(self._policy.local_prefill_threshold, decode, prefill, self._cluster.in_flight)
        computing = decode if decode.uncached_tokens <= plan.threshold else prefill
        if computing is not None:
            self._queued.plan(computing.worker, computing.uncached_tokens)
        return plan

    async def _relay(self, reservation: Reservation) -> None:
        """Reads the decode worker's events until every choice is complete."""
        while not self._output.is_finished:
            event = await reservation.next_event(self._policy.token_timeout_s)
            match event.WhichOneof("event"):
                case "ticket":
                    self._journal.granted(event.ticket, reservation.worker)
                    reservation.reach(event)
                case "started":
                    self._journal.started(event.started, reservation.worker)
                    if event.started.prefilled_locally:
                        uncached = len(self._generation.prompt) - event.started.cached_tokens
                        self._queued.on(reservation.worker, uncached)
                    reservation.reach(event)
                case "tokens":
                    self._journal.decoded()
                    self._queued.computed()
                    await self._deliver(event.tokens.choices, reservation)

    # -- handover

    async def _hand_over(self, reservation: Reservation) -> None:
        """Gets the prompt's KV into the decode worker: from one prefill worker or another, else computed there."""
        opened = await reservation.milestone(
            self._policy.reserve_timeout_s,
            NoFreeBlocks(f"Decode worker {reservation.worker.worker_id} had no room for the request in time."),
        )
        reason = "no_prefill_worker"
        while opened.HasField("ticket"):
            self._queued.leave()
            placement = self._place("prefill", self._failed_prefill)
            if placement is None:
                await self._prefill_on_decode(reservation, reason)
                return
            if self._record.state is RequestState.RETRYING:
                opened = await self._renew(reservation)
                continue
            try:
                await self._prefill(placement, opened.ticket.ticket, reservation)
                await self._begin(reservation)
                return
            except RequestError:
                raise
            except PdserveError as error:
                if reservation.has_started:
                    if self._output.has_first_tokens:
                        # It was lost after its work was done.
                        return
                    raise DecodeFailed(error) from error
                self._prefill_failed(placement, error)
                reason = reason_of(error)
        self._require_first_tokens(opened, reservation)

    async def _begin(self, reservation: Reservation) -> decode_pb2.DecodeResponse:
        """Returns when the decode worker has begun."""
        return await reservation.milestone(
            self._policy.token_timeout_s,
            TransferTimeout(f"Decode worker {reservation.worker.worker_id} did not begin to decode in time."),
        )

    def _require_first_tokens(self, begun: decode_pb2.DecodeResponse, reservation: Reservation) -> None:
        """A prefill worker that died between its commit and its first tokens took them with it: begin again at once."""
        if not begun.started.prefilled_locally and not self._output.has_first_tokens:
            raise DecodeFailed(
                TransferError(f"The first tokens on {reservation.worker.worker_id} were lost with the prefill worker.")
            )

    async def _renew(self, reservation: Reservation) -> decode_pb2.DecodeResponse:
        """A ticket for the new attempt; or the start, when the old attempt had been committed after all."""
        renewal = decode_pb2.RenewTicket(attempt=self._record.attempt)
        await reservation.send(decode_pb2.DecodeRequest(renew_ticket=renewal))
        while True:
            opened = await reservation.milestone(
                self._policy.reserve_timeout_s,
                TransferTimeout(f"Decode worker {reservation.worker.worker_id} did not renew the ticket in time."),
            )
            if not opened.HasField("ticket") or opened.ticket.ticket.attempt == self._record.attempt:
                return opened

    async def _prefill_on_decode(self, reservation: Reservation, reason: str) -> None:
        if self._record.state is not RequestState.RETRYING:
            self._record.move(RequestState.RETRYING)
        self._journal.fall_back(reason, reservation.worker)
        command = decode_pb2.PrefillLocally(attempt=self._record.attempt, forced_first_tokens=self._output.first_tokens)
        # How much of it is cached there, the worker tells when it starts.
        self._queued.on(reservation.worker, len(self._generation.prompt))
        await reservation.send(decode_pb2.DecodeRequest(prefill_locally=command))
        self._require_first_tokens(await self._begin(reservation), reservation)

    # -- prefill workers

    async def _prefill_is_enough(self) -> bool:
        """Runs a request for a single token without a decode worker; False when no prefill worker could."""
        while (placement := self._place("prefill", self._failed_prefill)) is not None:
            try:
                await self._prefill(placement, None, None)
                return True
            except RequestError:
                raise
            except PdserveError as error:
                self._prefill_failed(placement, error)
        return False

    def _prefill_failed(self, placement: Placement, error: PdserveError) -> None:
        self._failed_prefill.add(placement.incarnation)
        self._journal.failed_on(placement.worker, error)
        self._journal.retry(error, placement.worker)

    async def _prefill(
        self, placement: Placement, ticket: decode_pb2.Ticket | None, reservation: Reservation | None
    ) -> None:
        """The prompt on one prefill worker, until committed. Raises what the worker raised, `PeerLost` or silence."""
        worker = placement.worker
        self._journal.chose(placement)
        self._record.move(RequestState.PREFILLING, worker=worker)
        request = prefill_pb2.PrefillRequest(
            ref=self._ref(),
            prompt_token_ids=self._generation.prompt,
            sampling=self._sampling,
            ticket=ticket,
            forced_first_tokens=self._output.first_tokens,
            cache_salt=self._generation.cache_salt,
        )
        silence_s = ticket.lease_s * _SILENCE_SHARE if ticket is not None else self._policy.token_timeout_s
        self._queued.on(worker, placement.uncached_tokens)
        with self._queued:
            async with prefill_call(self._cluster.channels, worker, request) as call:
                while (event := await call.next_event(silence_s)) is not None:
                    match event.WhichOneof("event"):
                        case "progress":
                            self._journal.progressed(event.progress)
                            # The worker knows better than the index what it has cached, also of a prompt that waits.
                            done = max(event.progress.computed_tokens, event.progress.cached_tokens)
                            self._queued.on(worker, max(placement.prompt_tokens - done, 0))
                            if reservation is not None:
                                await reservation.send(decode_pb2.DecodeRequest(keep_lease=decode_pb2.KeepLease()))
                        case "first_token":
                            self._queued.computed()
                            await self._first_tokens(event.first_token, reservation)
                            if self._output.is_finished:
                                return
                        case "done":
                            self._journal.committed(event.done)
                            return
        raise PeerLost(f"Prefill worker {worker.worker_id} ended the stream before the transfer was committed.")

    async def _first_tokens(self, first: prefill_pb2.PrefillFirstToken, reservation: Reservation | None) -> None:
        self._journal.prefilled(first)
        await self._deliver(first.choices, reservation)
        if self._output.is_finished and reservation is not None:
            # Leaving the calls returns the ticket unsent.
            raise _AllDone

    # -- both

    async def _deliver(self, tokens: Sequence[common_pb2.ChoiceTokens], reservation: Reservation | None) -> None:
        """Gives tokens to the client, and tells the decode worker which choices a stop string ended."""
        deltas = self._output.push(map(tokens_from_wire, tokens))
        if not deltas:
            return
        self._journal.produced(self._output.completion_tokens)
        await self._emit(deltas)
        if reservation is not None and not self._output.is_finished:
            for index in ended_by_stop_string(deltas):
                stop = decode_pb2.StopChoice(choice_index=index)
                await reservation.send(decode_pb2.DecodeRequest(stop_choice=stop))

    def _place(self, tier: Tier, excluded: Collection[Incarnation]) -> Placement | None:
        """The best worker of a tier for this request, if there is one that has not failed it."""
        need = Need(
            prompt_tokens=len(self._generation.prompt),
            sequences=self._generation.sampling.n,
            overlap=self._overlap,
            excluded=excluded,
        )
        if tier == "decode":
            return choose_decode(self._cluster.ready(tier), need, self._cluster.in_flight)
        if len(excluded) >= _MAX_PREFILL_FAILURES:
            return None
        return choose_prefill(self._cluster.ready(tier), need, self._cluster.in_flight)

    def _ref(self) -> common_pb2.RequestRef:
        return common_pb2.RequestRef(
            request_id=self._generation.worker_request_id,
            attempt=self._record.attempt,
            router_id=self._cluster.in_flight.router_id,
        )
