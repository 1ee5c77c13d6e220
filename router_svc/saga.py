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
import re
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

from pdserve.base.errors import (
    CapacityError,
    NoFreeBlocks,
    NoWorkers,
    PdserveError,
    PeerLost,
    RequestError,
    TransferTimeout,
)
from pdserve.base.ids import WorkerId
from pdserve.base.wire import sampling_to_wire, tokens_from_wire
from pdserve.base.workers import WorkerRecord
from pdserve.v1 import common_pb2, decode_pb2, prefill_pb2
from router_svc.calls import DecodeCall, decode_call, is_gone, prefill_call
from router_svc.cluster import Cluster
from router_svc.generation import Generation
from router_svc.output import ChoiceDelta, Output, ended_by_stop_string
from router_svc.placement import Incarnation, Need, Placement, choose_decode, choose_prefill
from router_svc.record import Phase, Record
from router_svc.request_state import RequestState

ALWAYS_LOCAL = 2**32 - 1
#: Decode workers that may be lost under one request: a request that kills its worker must not go through all of them.
_MAX_DECODE_LOSSES = 1
#: As much for prefill workers; after that the decode worker prefills.
_MAX_PREFILL_FAILURES = 2

_S = RequestState


class _DecodeFailed(Exception):
    """What went wrong has to do with the decode worker, whoever met it. Never leaves this module."""

    def __init__(self, error: PdserveError) -> None:
        super().__init__(str(error))
        self.error = error


class _AllDone(Exception):
    """Every choice is complete while the decode worker has not begun. Never leaves this module."""


class _Reservation:
    """A request's place on a decode worker."""

    def __init__(self, call: DecodeCall, worker: WorkerRecord) -> None:
        self._call = call
        self.worker = worker
        #: Tickets and the start, as they come; bounded by the number of attempts.
        self.milestones: asyncio.Queue[decode_pb2.DecodeResponse] = asyncio.Queue()
        self.has_started = False

    async def send(self, request: decode_pb2.DecodeRequest) -> None:
        try:
            await self._call.send(request)
        except PdserveError as error:
            raise _DecodeFailed(error) from error

    async def next_event(self, silence_s: float | None) -> decode_pb2.DecodeResponse:
        try:
            event = await self._call.next_event(silence_s)
            if event is None:
                raise PeerLost(f"Decode worker {self.worker.worker_id} ended the stream before the request was done.")
        except PdserveError as error:
            raise _DecodeFailed(error) from error
        return event

    async def milestone(self, timeout_s: float, error: PdserveError) -> decode_pb2.DecodeResponse:
        """The next ticket or start. Fails with `error` when that takes too long."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.milestones.get()
        except TimeoutError:
            raise _DecodeFailed(error) from error


class Saga:
    """Runs one generation. Everything it decides goes into the record, every delta to `emit`."""

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
        self._record = record
        self._output = output
        self._emit = emit
        # Both tiers may have tokens at the same moment; the client gets them in order.
        self._emitting = asyncio.Lock()
        self._last_emit_s: float | None = None
        self._sampling = sampling_to_wire(generation.sampling)
        self._overlap: dict[WorkerId, int] = {}

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
        deadline = self._now() + self._policy.reserve_timeout_s
        while True:
            version = self._cluster.directory.version
            placement = choose_decode(self._cluster.ready("decode"), self._need(excluded), self._cluster.in_flight)
            if placement is None:
                if refusal is None:
                    raise NoWorkers("No decode worker is ready. Try again in a few seconds.")
                # All of them refused for lack of room: each heartbeat may bring some.
                await self._wait_for_room(version, deadline, refusal)
                excluded.clear()
                continue
            try:
                await self._run_on(placement)
                return
            except _DecodeFailed as failure:
                error = failure.error
            incarnation = (placement.worker.worker_id, placement.worker.epoch)
            excluded.add(incarnation)
            if isinstance(error, CapacityError) and not self._output.has_started:
                refusal = error
            else:
                losses += 1
                self._note_lost(placement.worker, error)
                if not self._may_move_on(error, losses, excluded):
                    raise error
            self._retry(error, placement.worker)
            self._output.forget_early()

    def _may_move_on(self, error: PdserveError, losses: int, excluded: set[Incarnation]) -> bool:
        """Whether another decode worker may take the request over without the client noticing."""
        if isinstance(error, RequestError) or losses > _MAX_DECODE_LOSSES or self._output.is_past_first_tokens:
            return False
        if self._output.has_started and not (self._output.has_first_tokens and self._cluster.ready("prefill")):
            # Only a prefill worker can be told which first tokens the client has.
            return False
        return choose_decode(self._cluster.ready("decode"), self._need(excluded), self._cluster.in_flight) is not None

    async def _wait_for_room(self, version: int, deadline: float, refusal: CapacityError) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._cluster.directory.wait_for_change(version)
        except TimeoutError:
            raise refusal from None

    async def _run_on(self, placement: Placement) -> None:
        """The request on one decode worker, until done. Raises `_DecodeFailed`, or an error for the client."""
        worker = placement.worker
        self._record.decide(worker, placement.why)
        start = decode_pb2.DecodeStart(
            ref=self._ref(),
            prompt_token_ids=self._generation.prompt,
            sampling=self._sampling,
            local_prefill_threshold=self._local_prefill_threshold(),
            cache_salt=self._generation.cache_salt,
        )
        with self._cluster.in_flight.decoding(worker.worker_id, self._generation.sampling.n):
            async with decode_call(self._cluster.channels, worker) as call:
                reservation = _Reservation(call, worker)
                await reservation.send(decode_pb2.DecodeRequest(start=start))
                try:
                    async with asyncio.TaskGroup() as tasks:
                        handover = tasks.create_task(self._hand_over(reservation))
                        await self._relay(reservation)
                        handover.cancel()
                except* _AllDone:
                    pass
                except* (_DecodeFailed, PdserveError) as errors:
                    # Both sides may have met the same failure; the first one explains it.
                    raise errors.exceptions[0] from None

    def _local_prefill_threshold(self) -> int:
        if self._output.has_started:
            return 0
        if self._cluster.ready("prefill"):
            return self._policy.local_prefill_threshold
        if self._policy.expects_prefill:
            self._fall_back("no_prefill_worker", None)
        return ALWAYS_LOCAL

    async def _relay(self, reservation: _Reservation) -> None:
        """Reads the decode worker's events until every choice is complete."""
        while True:
            silence_s = self._policy.token_timeout_s if reservation.has_started else None
            event = await reservation.next_event(silence_s)
            match event.WhichOneof("event"):
                case "ticket":
                    self._granted(event.ticket, reservation)
                    reservation.milestones.put_nowait(event)
                case "started":
                    self._started(event.started, reservation)
                    reservation.milestones.put_nowait(event)
                case "tokens":
                    self._record.mark(Phase.FIRST_DECODE)
                    await self._deliver(event.tokens.choices, reservation)
            if self._output.is_finished:
                return

    def _granted(self, granted: decode_pb2.TicketGranted, reservation: _Reservation) -> None:
        if self._record.state in (_S.QUEUED, _S.RETRYING):
            self._record.move(_S.RESERVED, worker=reservation.worker)
        self._record.mark(Phase.RESERVED)
        self._record.reported["reserve_s"] = granted.reserve_s

    def _started(self, started: decode_pb2.DecodeStarted, reservation: _Reservation) -> None:
        reservation.has_started = True
        if self._record.state in (_S.QUEUED, _S.RETRYING):
            self._record.move(_S.RESERVED, worker=reservation.worker)
            self._record.mark(Phase.RESERVED)
        self._record.move(_S.DECODING)
        self._record.reported["decode_queue_s"] = started.queue_s
        if started.prefilled_locally:
            self._record.prefilled_by = "decode"
            self._record.cached_tokens = started.cached_tokens
        else:
            self._record.mark(Phase.COMMIT)

    # -- handover

    async def _hand_over(self, reservation: _Reservation) -> None:
        """Gets the prompt's KV into the decode worker: from one prefill worker or another, else computed there."""
        opened = await reservation.milestone(
            self._policy.reserve_timeout_s,
            NoFreeBlocks(f"Decode worker {reservation.worker.worker_id} had no room for the request in time."),
        )
        excluded: set[Incarnation] = set()
        reason = "no_prefill_worker"
        while opened.HasField("ticket"):
            candidates = self._cluster.ready("prefill") if len(excluded) < _MAX_PREFILL_FAILURES else []
            placement = choose_prefill(candidates, self._need(excluded), self._cluster.in_flight)
            if placement is None:
                await self._prefill_on_decode(reservation, reason)
                return
            if self._record.state is _S.RETRYING:
                opened = await self._renew(reservation)
                continue
            try:
                await self._prefill(placement, opened.ticket.ticket, reservation)
                await self._next_start(reservation)
                return
            except RequestError:
                raise
            except PdserveError as error:
                if reservation.has_started:
                    if self._output.has_first_tokens:
                        # It was lost after its work was done.
                        return
                    raise _DecodeFailed(error) from error
                excluded.add((placement.worker.worker_id, placement.worker.epoch))
                self._note_lost(placement.worker, error)
                self._retry(error, placement.worker)
                reason = _reason(error)

    async def _next_start(self, reservation: _Reservation) -> decode_pb2.DecodeResponse:
        return await reservation.milestone(
            self._policy.token_timeout_s,
            TransferTimeout(f"Decode worker {reservation.worker.worker_id} did not begin to decode in time."),
        )

    async def _renew(self, reservation: _Reservation) -> decode_pb2.DecodeResponse:
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

    async def _prefill_on_decode(self, reservation: _Reservation, reason: str) -> None:
        if self._record.state is not _S.RETRYING:
            self._record.move(_S.RETRYING)
        self._fall_back(reason, reservation.worker)
        command = decode_pb2.PrefillLocally(attempt=self._record.attempt, forced_first_tokens=self._output.first_tokens)
        await reservation.send(decode_pb2.DecodeRequest(prefill_locally=command))
        await self._next_start(reservation)

    # -- prefill workers

    async def _prefill_is_enough(self) -> bool:
        """Runs a request for a single token without a decode worker; False when no prefill worker could."""
        excluded: set[Incarnation] = set()
        while len(excluded) < _MAX_PREFILL_FAILURES:
            placement = choose_prefill(self._cluster.ready("prefill"), self._need(excluded), self._cluster.in_flight)
            if placement is None:
                break
            try:
                await self._prefill(placement, None, None)
                return True
            except RequestError:
                raise
            except PdserveError as error:
                excluded.add((placement.worker.worker_id, placement.worker.epoch))
                self._note_lost(placement.worker, error)
                self._retry(error, placement.worker)
        return False

    async def _prefill(
        self, placement: Placement, ticket: decode_pb2.Ticket | None, reservation: _Reservation | None
    ) -> None:
        """The prompt on one prefill worker, until committed. Raises what the worker raised, `PeerLost` or silence."""
        worker = placement.worker
        self._record.decide(worker, placement.why)
        self._record.move(_S.PREFILLING, worker=worker)
        request = prefill_pb2.PrefillRequest(
            ref=self._ref(),
            prompt_token_ids=self._generation.prompt,
            sampling=self._sampling,
            ticket=ticket,
            forced_first_tokens=self._output.first_tokens,
            cache_salt=self._generation.cache_salt,
        )
        silence_s = ticket.lease_s if ticket is not None else self._policy.token_timeout_s
        uncached = len(self._generation.prompt) - placement.expected_cached_tokens
        with ExitStack() as queued:
            queued.enter_context(self._cluster.in_flight.prefilling(worker.worker_id, uncached))
            async with prefill_call(self._cluster.channels, worker, request) as call:
                while (event := await call.next_event(silence_s)) is not None:
                    match event.WhichOneof("event"):
                        case "progress":
                            self._progressed(event.progress)
                            if reservation is not None:
                                await reservation.send(decode_pb2.DecodeRequest(keep_lease=decode_pb2.KeepLease()))
                        case "first_token":
                            queued.close()
                            await self._first_tokens(event.first_token, reservation)
                            if self._output.is_finished:
                                return
                        case "done":
                            self._committed(event.done)
                            return
        raise PeerLost(f"Prefill worker {worker.worker_id} ended the stream before the transfer was committed.")

    def _progressed(self, progress: prefill_pb2.PrefillProgress) -> None:
        if progress.queued:
            return
        self._record.mark(Phase.PREFILL_START)
        if progress.computed_tokens:
            self._record.computed(progress.computed_tokens)

    async def _first_tokens(self, first: prefill_pb2.PrefillFirstToken, reservation: _Reservation | None) -> None:
        self._record.prefilled_by = "prefill"
        self._record.cached_tokens = first.cached_tokens
        await self._deliver(first.choices, reservation)
        if self._output.is_finished and reservation is not None:
            # Leaving the calls returns the ticket unsent.
            raise _AllDone

    def _committed(self, done: prefill_pb2.PrefillDone) -> None:
        self._record.mark(Phase.COMMIT)
        self._record.reported.update(
            prefill_queue_s=done.queue_s,
            prefill_compute_s=done.compute_s,
            transfer_s=done.transfer_s,
            commit_s=done.commit_s,
            sent_bytes=done.sent_bytes,
            sent_blocks=done.sent_blocks,
            chunks=done.chunks,
        )

    # -- both

    async def _deliver(self, tokens: Sequence[common_pb2.ChoiceTokens], reservation: _Reservation | None) -> None:
        """Gives tokens to the client, and tells the decode worker which choices a stop string ended."""
        async with self._emitting:
            deltas = self._output.push(map(tokens_from_wire, tokens))
            if not deltas:
                return
            self._record.mark(Phase.FIRST_TOKEN)
            self._record.completion_tokens = self._output.completion_tokens
            self._measure_gap()
            await self._emit(deltas)
        if reservation is not None and not self._output.is_finished:
            for index in ended_by_stop_string(deltas):
                stop = decode_pb2.StopChoice(choice_index=index)
                await reservation.send(decode_pb2.DecodeRequest(stop_choice=stop))

    def _measure_gap(self) -> None:
        now = self._record.elapsed_s()
        if self._last_emit_s is not None:
            self._cluster.metrics.inter_token_latency.observe(now - self._last_emit_s)
        self._last_emit_s = now

    def _need(self, excluded: set[Incarnation]) -> Need:
        return Need(
            prompt_tokens=len(self._generation.prompt),
            sequences=self._generation.sampling.n,
            overlap=self._overlap,
            excluded=excluded,
        )

    def _ref(self) -> common_pb2.RequestRef:
        return common_pb2.RequestRef(request_id=self._generation.worker_request_id, attempt=self._record.attempt)

    def _note_lost(self, worker: WorkerRecord, error: PdserveError) -> None:
        if is_gone(error):
            self._cluster.directory.mark_lost(worker.worker_id, worker.epoch)

    def _retry(self, error: PdserveError, worker: WorkerRecord) -> None:
        self._record.retries.append(self._record.incident(_reason(error), worker.worker_id, error))
        self._cluster.metrics.retried(_reason(error))
        self._record.move(_S.RETRYING)

    def _fall_back(self, reason: str, worker: WorkerRecord | None) -> None:
        worker_id = worker.worker_id if worker is not None else None
        self._record.fallbacks.append(self._record.incident(reason, worker_id, None))
        self._cluster.metrics.fell_back(reason)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


def _reason(error: PdserveError) -> str:
    """`PeerLost` as `peer_lost`: what metrics and records call it."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(error).__name__).lower()
