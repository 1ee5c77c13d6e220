"""Every way that a request can go through failing, full and lost workers, as its saga decides."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import pytest

from pdserve.base.errors import PdserveError
from pdserve.v1 import decode_pb2
from router_svc.records.request_state import TRANSITIONS, RequestProgress, RequestState
from router_svc.request import recovery
from router_svc.request.decode_attempt import DecodeAttempt
from router_svc.request.recovery import NextStep, Recovery
from router_svc.request.scoring import Scoring
from router_svc.request.waiting import Waiting
from tests.model_check import saga_cluster
from tests.model_check.saga import SagaWorld, install
from tests.model_check.saga_cluster import Bounds
from tests.model_check.search import Counterexample, Searched, search
from tests.support.depth import IS_FULL

_NO_LOSS = {"losses": 0, "tokens": 0}
_FULL, _REFUSED = frozenset({"ticket", "started"}), frozenset({"refused", "late", "time"})
CASES = {
    "one worker": Bounds(decode=1, prefill=0, losses=0, tokens=1),
    "a worker of each tier, and a loss": Bounds(decode=1, losses=1, tokens=0, never=frozenset({"lost-lease"})),
    "two prefill workers": Bounds(decode=1, prefill=2, never=frozenset({"refused", "breaks"}), **_NO_LOSS),
    "two decode workers": Bounds(prefill=0, losses=1, tokens=0, never=frozenset({"lost-own", "lost-lease", "late"})),
    "a prompt that is scored": Bounds(
        decode=1,
        prefill=2,
        losses=1,
        tokens=0,
        scores=True,
        never=frozenset({"refused", "breaks", "lost-lease", "late", "lost-own", "wrong", "stale-ticket"}),
    ),
    "workers that stay full": Bounds(prefill=0, never=_FULL, fair=_REFUSED, **_NO_LOSS),
    "workers that stay away": Bounds(prefill=0, never=frozenset({"return", "late", "refused", "wrong"}), tokens=0),
}
DEEP = {
    "a token before a loss": Bounds(prefill=0, losses=1, tokens=1, never=frozenset({"late"})),
    "two workers of each tier": Bounds(
        prefill=2, never=frozenset({"lost-own", "late", "lost-lease"}), losses=1, tokens=0
    ),
    "three losses": Bounds(decode=1, losses=3, tokens=0, never=frozenset({"lost-lease", "late", "breaks"})),
}


@pytest.fixture(autouse=True)
def _decided_by_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def checked(case: str) -> Searched:
    """Searches one of the cases. Raises `Counterexample`."""
    return search(SagaWorld({**CASES, **DEEP}[case]), max_states=500_000)


@pytest.mark.parametrize("case", {**CASES, **(DEEP if IS_FULL else {})})
def test_every_admitted_request_ends_and_no_attempt_is_stale(case: str) -> None:
    found = checked(case)
    assert "deadline" in found.actions
    assert found.num_states > 5


def test_every_state_of_a_request_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[RequestState] = set()
    advance = RequestProgress.advance

    def watched(progress: RequestProgress, state: RequestState, **named: Any) -> RequestProgress:
        seen.update((progress.state, state))
        return advance(progress, state, **named)

    monkeypatch.setattr(RequestProgress, "advance", watched)
    checked("two prefill workers")
    checked("a prompt that is scored")
    assert seen == set(RequestState) - {RequestState.CANCELLED}


# What the search finds when something is taken away.
def test_a_state_without_a_way_to_an_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRANSITIONS, RequestState.RETRYING, TRANSITIONS[RequestState.RETRYING] - {RequestState.FAILED})
    with pytest.raises(Counterexample, match="cannot go from retrying to failed"):
        checked("one worker")


def test_retries_without_pauses_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "backoff_s", lambda failures, key: 0.0)
    with pytest.raises(Counterexample, match="calls without a pause"):
        checked("one worker")


def test_giving_up_although_there_is_another_worker_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recovery, "next_step", lambda *_, **__: NextStep.FAIL)
    with pytest.raises(Counterexample, match="could take it"):
        checked("two decode workers")


def test_scores_that_are_given_up_although_a_worker_could_make_them_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def impatient(scoring: Any, placement: Any, error: PdserveError) -> None:
        raise error

    monkeypatch.setattr(Scoring, "_failed", impatient)
    with pytest.raises(Counterexample, match="could score it"):
        checked("a prompt that is scored")


def test_an_attempt_with_an_old_number_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = RequestProgress.advance

    def forgetful(progress: RequestProgress, state: RequestState, **named: Any) -> RequestProgress:
        after = advance(progress, state, **named)
        history = [dataclasses.replace(change, attempt=1) for change in after.history]
        return dataclasses.replace(after, history=tuple(history))

    monkeypatch.setattr(RequestProgress, "advance", forgetful)
    with pytest.raises(Counterexample, match="it is stale"):
        checked("one worker")


def test_the_ticket_of_an_older_attempt_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def any_ticket(attempt: Any) -> Any:
        renewal = decode_pb2.RenewTicket(attempt=attempt._journal.record.attempt)
        await attempt._call.send(decode_pb2.DecodeRequest(renew_ticket=renewal))
        return await attempt._call.milestone(None, PdserveError("never"))

    monkeypatch.setattr(DecodeAttempt, "_renew_ticket", any_ticket)
    with pytest.raises(Counterexample, match="gets the ticket of attempt"):
        checked("two prefill workers")


def test_a_wait_without_an_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saga_cluster, "_LIMIT_S", math.inf)
    with pytest.raises(Counterexample, match="nothing leads to an end"):
        checked("workers that stay full")


def test_a_request_that_goes_on_after_its_deadline_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = Waiting.heartbeat

    async def patient(waiting: Waiting, waits: int, until: float | None = None) -> None:
        try:
            await heartbeat(waiting, waits, until)
        except asyncio.CancelledError:
            await heartbeat(waiting, waits, until)

    monkeypatch.setattr(Waiting, "heartbeat", patient)
    with pytest.raises(Counterexample, match="deadline: the request goes on"):
        checked("workers that stay full")
