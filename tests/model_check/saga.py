"""A request's saga as a model: the router's own coroutines, run again for each way through their decisions.

`Saga` and `DecodeAttempt._hand_over` run unchanged, with the journal, the recovery policy and the quarantine. What they
wait for is a decision of the search: how a call goes on, what the world does during a pause. A state is where the
coroutine stands and what it remembers. Time has two lengths: a pause, and longer than all limits but the deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pdserve.base.errors import (
    DeadlineExceeded,
    Draining,
    InvalidTransition,
    NoFreeBlocks,
    PdserveError,
    RequestError,
    TransferError,
)
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SCORING_VERSION, SamplingParams, TokenLogprobs
from pdserve.peers.workers import Tier, WorkerRecord
from pdserve.v1 import decode_pb2
from router_svc.generation import Generation, TextRules
from router_svc.records.events import BlocksReserved, DecodeStarted, Ended, PrefillScored, WorkerChosen
from router_svc.records.journal import Journal
from router_svc.records.record import Record
from router_svc.records.request_state import TRANSITIONS, RequestState
from router_svc.request import decode_attempt, saga, waiting
from router_svc.request.calls import DecodeFailed, _Reported
from router_svc.request.decode_attempt import DecodeAttempt
from router_svc.request.delivery import Delivery
from router_svc.request.losses import Losses
from router_svc.request.placer import Placer
from router_svc.request.quarantine import Quarantine
from router_svc.request.running_prompt import RunningPrompt
from router_svc.request.saga import Saga
from router_svc.request.scoring import Scoring
from router_svc.request.worker_messages import WorkerMessages
from router_svc.routing.cluster import PrefixHashes
from router_svc.routing.home import Home
from router_svc.routing.in_flight import QueuedPrompt
from router_svc.routing.incarnation import incarnation_of
from tests.model_check.saga_cluster import Bounds, Nothing, SagaCluster, Waiting
from tests.model_check.search import Broken

_GENERATION = Generation(
    request_id=RequestId("r"),
    worker_request_id=RequestId("r"),
    prompt=tuple(range(40)),
    sampling=SamplingParams(max_tokens=9),
    text=TextRules(),
    endpoint="test",
)


class _Call:
    """An open call to a decode worker."""

    def __init__(self, prompt: RunningPrompt, worker: WorkerRecord) -> None:
        self._prompt = prompt
        self._cluster: Any = prompt.cluster
        self.worker = worker
        self.has_started = False
        self.attempt = prompt.journal.record.attempt
        #: What the router has done last.
        self.after = "start"

    async def send(self, command: decode_pb2.DecodeRequest) -> None:
        self.after = str(command.WhichOneof("command"))
        self.attempt = getattr(command, self.after).attempt
        self._cluster.new_attempt(self.attempt)

    async def milestone(self, timeout_s: float | None, error: PdserveError) -> decode_pb2.DecodeResponse:
        decisions = {
            "start": ("ticket", "started", "refused"),
            "renew_ticket": ("ticket", "stale-ticket", "started", "refused"),
        }
        late = () if timeout_s is None else ("late",)
        decision = await self._cluster.decide(*decisions.get(self.after, ("started",)), "lost", *late)
        match decision:
            case "started":
                return self._started()
            case "ticket" | "stale-ticket":
                attempt = self.attempt - (decision == "stale-ticket")
                granted = decode_pb2.TicketGranted(
                    ticket=decode_pb2.Ticket(attempt=attempt, data_address=b"an address")
                )
                reserved = BlocksReserved(worker=self.worker.worker_id, reserve_s=0.0)
                self._prompt.journal.append(reserved)
                return decode_pb2.DecodeResponse(ticket=granted)
            case "late":
                raise DecodeFailed(error, self.worker) from error
            case "refused":
                raise DecodeFailed(_reported(NoFreeBlocks("no free blocks")), self.worker)
        raise DecodeFailed(self._cluster.lose(self.worker), self.worker)

    def _started(self) -> decode_pb2.DecodeResponse:
        self.has_started = True
        started = decode_pb2.DecodeStarted(prefilled_locally=self.after in ("start", "prefill_locally"))
        if started.prefilled_locally:
            self._cluster.output.gain(1)
        self._prompt.journal.append(DecodeStarted.of(started, self.worker))
        return decode_pb2.DecodeResponse(started=started)


async def _prefill(prompt: Any, placement: Any, ticket: Any, call: Any) -> None:
    """In place of the call to a prefill worker."""
    cluster: SagaCluster = prompt.cluster
    prompt.journal.append(WorkerChosen.of(placement))
    if ticket.attempt != call.attempt or ticket.attempt != prompt.journal.record.attempt:
        raise Broken(f"a prefill worker gets the ticket of attempt {ticket.attempt} in attempt {call.attempt}")
    decision = await cluster.decide("committed", "prefill-lost", "prefill-lost-later", "prefill-fails")
    if decision in ("committed", "prefill-lost-later"):
        cluster.output.gain(1)
    if decision == "committed":
        call.after = "committed"
        return
    raise _reported(TransferError("it failed")) if decision == "prefill-fails" else cluster.lose(placement.worker)


async def _score(scoring: Any, placement: Any) -> list[TokenLogprobs]:
    """In place of the call to a prefill worker that scores the prompt."""
    prompt = scoring._prompt
    cluster: SagaCluster = prompt.cluster
    prompt.journal.append(WorkerChosen.of(placement, scores=True))
    cluster.new_scoring(prompt.journal.record.attempt)
    match await cluster.decide("scored", "prefill-lost", "prefill-drains", "prefill-fails"):
        case "scored":
            return [TokenLogprobs(logprob=-1.0, rank=1)] * 39
        case "prefill-fails":
            raise _reported(TransferError("it failed"))
        case "prefill-drains":
            raise _reported(Draining("it drains"))
    raise cluster.lose(placement.worker)


def _no_delivery(delivery: object, scores: object) -> None:
    """The client has the scores."""


class _Run:
    """In place of `MigratingRun`: one call, and no moves."""

    def __init__(self, prompt: Any, placement: Any) -> None:
        self.placement = placement
        self._prompt = prompt

    async def run(self, start: decode_pb2.DecodeStart) -> None:
        cluster: SagaCluster = self._prompt.cluster
        worker = self.placement.worker
        cluster.new_attempt(start.ref.attempt)
        cluster.new_call()
        await DecodeAttempt(self._prompt, _Call(self._prompt, worker))._hand_over()  # type: ignore[arg-type]
        decision = await cluster.decide("done", "lost", "lost-own", "breaks", "lost-lease", "wrong", "token")
        while decision == "token":
            cluster.output.gain(cluster.output.completion_tokens + 1)
            decision = await cluster.decide("done", "lost", "breaks")
        errors: dict[str, Callable[[], PdserveError]] = {
            "breaks": lambda: _reported(PdserveError("it cannot go on")),
            "lost-lease": lambda: _reported(TransferError("the lease is over")),
            "wrong": lambda: _reported(RequestError("it is wrong")),
            "lost": lambda: cluster.lose(worker),
            "lost-own": lambda: cluster.lose(worker, is_own=True),
        }
        if decision != "done":
            raise DecodeFailed(errors[decision](), worker)


def _reported(error: PdserveError) -> PdserveError:
    error.__cause__ = _Reported()
    return error


def _new_saga(cluster: SagaCluster, bounds: Bounds) -> tuple[Saga, Journal]:
    generation = replace(_GENERATION, prompt_logprobs=0 if bounds.scores else None)
    record = Record.new(generation, accepted_at=0.0, clock=lambda: 0.0)
    nothing: Any = Nothing()
    journal = Journal(record, nothing, nothing)
    any_cluster: Any = cluster
    any_output: Any = cluster.output
    placer = Placer(generation, PrefixHashes(generation.prompt, b""), any_cluster, any_output)
    prompt = RunningPrompt(
        generation=generation,
        cluster=any_cluster,
        journal=journal,
        output=any_output,
        delivery=Delivery(generation, any_output, nothing, journal),
        placer=placer,
        losses=Losses(generation, any_cluster, journal, placer, Quarantine()),
        messages=WorkerMessages(generation, any_output, journal, placer, cluster.in_flight.router_id),
        queued=QueuedPrompt(cluster.in_flight),
    )
    return Saga(prompt, Home()), journal


@contextmanager
def _named(decision: str) -> Iterator[None]:
    try:
        yield
    except (AssertionError, InvalidTransition, Broken) as error:
        raise Broken(f"{decision}: {error}") from error


class SagaWorld:
    """A state of the model: what leads there. Implements `tests.model_check.search.World`."""

    def __init__(self, bounds: Bounds, path: tuple[str, ...] = ()) -> None:
        self._bounds = bounds
        self._path = path
        self._cluster = SagaCluster(bounds)
        self._saga, self._journal = _new_saga(self._cluster, bounds)
        self._waits_for: tuple[str, ...] = ()
        coroutine = self._coroutine = self._saga.run()
        try:
            self._waits_for = coroutine.send(None)  # type: ignore[arg-type]
            for decision in path:
                if decision == "pause":
                    self._cluster.at_once = 0
                self._waits_for = coroutine.send(decision)  # type: ignore[arg-type]
        except StopIteration:
            self._end(Ended.finished(["length"]))
        except PdserveError as error:
            self._require_hopeless(error)
            self._end(Ended.failed(error))

    def _end(self, end: Ended) -> None:
        self._waits_for = ()
        self._journal.append(end)

    @property
    def is_final(self) -> bool:
        return self._journal.record.state.is_final

    def successors(self) -> Iterator[tuple[str, bool, SagaWorld]]:
        for decision in self._waits_for:
            name = decision.partition(" ")[0]
            if name in self._bounds.never:
                continue
            with _named(decision):
                after = SagaWorld(self._bounds, (*self._path, decision))
            yield decision, name in self._bounds.fair, after
        if not self.is_final:  # Last: this world itself goes on.
            is_fair = self._waits_for_return
            with _named("deadline"):
                self._reach_deadline()
            yield "deadline", is_fair, self

    @property
    def _waits_for_return(self) -> bool:
        """Whether nothing but the deadline may end the request: it waits for a tier that is gone."""
        if "heartbeat" not in self._waits_for:
            return False
        scoring = self._scoring
        tier: Tier = "prefill" if scoring or not self._saga._placer.deaths.may_reach("decode") else "decode"
        ready = {*map(incarnation_of, self._cluster.ready(tier))}
        return not ready - (scoring._draining if scoring else set())

    @property
    def _is_scored(self) -> bool:
        return bool(self._journal.record.log.num(PrefillScored))

    @property
    def _scoring(self) -> Scoring | None:
        """What scores the prompt at present."""
        selves = (each.get("self") for each in _frames(self._coroutine))
        return next((each for each in selves if isinstance(each, Scoring)), None)

    def _reach_deadline(self) -> None:
        try:
            self._coroutine.throw(asyncio.CancelledError())
        except asyncio.CancelledError:
            pass
        else:
            raise Broken("the request goes on")
        if RequestState.CANCELLED not in TRANSITIONS[self._journal.record.state]:
            raise Broken(f"a client cannot leave a request that is {self._journal.record.state}")
        self._end(Ended.ended_early(DeadlineExceeded("its time is over")))

    def key(self) -> Hashable:
        if self.is_final:
            return self._journal.record.state
        recovery, cluster, placer = self._saga._recovery, self._cluster, self._saga._placer
        locals_of = list(_frames(self._coroutine))
        run = locals_of[1] if len(locals_of) > 1 else {}
        call = next((each["self"]._call for each in locals_of if isinstance(each.get("self"), DecodeAttempt)), None)
        scoring = self._scoring
        return (
            self._journal.record.state,
            self._is_scored,
            scoring and (scoring._was_expected, frozenset(scoring._draining)),
            self._waits_for,
            *(frozenset(each) for each in (recovery._failed, recovery._avoided, recovery._met)),
            min(recovery._failures, 3),
            recovery._broken,
            cluster.now < recovery._patient_until,
            cluster.now < (recovery.capacity_until or 0.0),
            recovery.capacity_until is None,
            type(run.get("refusal")),
            frozenset(placer.failed_prefill),
            placer.prefill_failures,
            placer.deaths,
            self._saga._losses.decode_answers > recovery._progress.answers,
            cluster.output.completion_tokens,
            cluster.output.completion_tokens > recovery._progress.tokens,
            call and (call.worker.worker_id, call.after, call.has_started),
            cluster.key(),
        )

    def _require_hopeless(self, error: PdserveError) -> None:
        """Nobody gives up while a worker that has not failed the request could take it."""
        cluster, saga = self._cluster, self._saga
        if isinstance(error, RequestError) or saga._recovery.is_final or saga._placer.deaths.is_over:
            return
        if not saga._placer.deaths.may_reach("decode"):  # It waits for prefill workers alone.
            return
        if self._bounds.scores and not self._is_scored:
            if saga._placer.choose_without_output(SCORING_VERSION) is not None:
                raise Broken(f"the request fails ({error}) although a prefill worker could score it")
            return
        _, failed = saga._recovery.exclusions
        untried = [each.worker_id for each in cluster.ready("decode") if incarnation_of(each) not in failed]
        if untried:
            raise Broken(f"the request fails ({error}) although {untried} could take it")


def _frames(coroutine: Any) -> Iterator[dict[str, Any]]:
    """The variables of a coroutine and of those that it waits for."""
    while getattr(coroutine, "cr_frame", None) is not None:
        yield coroutine.cr_frame.f_locals
        coroutine = coroutine.cr_await


async def _sleep(seconds: float) -> None:
    if seconds > 0:
        await Waiting("pause")


def install(patch: pytest.MonkeyPatch) -> None:
    """The saga's modules take their calls, clock and pauses from here."""
    pauses = SimpleNamespace(sleep=_sleep, timeout_at=lambda when: nullcontext())
    patch.setattr(saga, "MigratingRun", _Run)
    patch.setattr(decode_attempt, "prefill", _prefill)
    patch.setattr(Scoring, "_attempt", _score)
    patch.setattr(Delivery, "scores", _no_delivery)
    patch.setattr(waiting.Waiting, "now", lambda self: self._cluster.now)
    for module in (saga, waiting):
        patch.setattr(module, "asyncio", pauses)
