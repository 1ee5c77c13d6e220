"""The request's state machine: every pair of states is either a legal transition or raises InvalidTransition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import Epoch, RequestId, WorkerId
from router_svc.records.event_log import EventLog
from router_svc.records.events import (
    BlocksReserved,
    DecodeStarted,
    Ended,
    LocalPrefillOrdered,
    MigrationOutcome,
    MoveEnded,
    MoveStarted,
    Retried,
    WorkerChosen,
)
from router_svc.records.request_state import RequestProgress, RequestState, StateChange
from router_svc.records.transitions import progress_after

# A second copy on purpose: a change of the table must be a decision, not a slip.
LEGAL = {
    (RequestState(source), RequestState(target))
    for source, targets in {
        "queued": "scoring reserved prefilling finished retrying failed cancelled",
        "scoring": "reserved prefilling finished retrying failed cancelled",
        "reserved": "prefilling decoding retrying failed cancelled",
        "prefilling": "decoding finished retrying failed cancelled",
        "decoding": "finished retrying failed cancelled",
        "retrying": "retrying scoring reserved prefilling failed cancelled",
    }.items()
    for target in targets.split()
}
FINAL = {RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED}


def in_state(state: RequestState) -> RequestProgress:
    return RequestProgress(request_id=RequestId("r"), history=(StateChange(state=state, attempt=3, at=1.0),))


@pytest.mark.parametrize(("source", "target"), sorted(LEGAL))
def test_legal_transitions(source: RequestState, target: RequestState) -> None:
    after = in_state(source).advance(target, at=2.0)
    assert after.state is target
    assert after.attempt == (4 if target is RequestState.RETRYING else 3)
    assert after.history[0] == in_state(source).history[0]


@pytest.mark.parametrize(
    ("source", "target"), sorted(set(itertools.product(RequestState, RequestState)) - LEGAL), ids=str
)
def test_any_other_transition_raises_with_the_history(source: RequestState, target: RequestState) -> None:
    before = in_state(source)
    with pytest.raises(InvalidTransition, match=rf"Request r cannot go from {source} to {target}.*{source}:3"):
        before.advance(target, at=2.0)
    assert before == in_state(source)


def test_final_states_are_those_without_transitions() -> None:
    assert {state for state in RequestState if state.is_final} == FINAL


@settings(deadline=None)
@given(st.data())
def test_marks_are_unique_in_every_history_and_attempts_count_retries(data: st.DataObject) -> None:
    progress = RequestProgress.new(RequestId("r"), at=0.0)
    for number in range(data.draw(st.integers(0, 25), label="steps")):
        choices = sorted(target for source, target in LEGAL if source is progress.state)
        if not choices:
            break
        progress = progress.advance(data.draw(st.sampled_from(choices)), at=float(number))
    marks = [step.mark for step in progress.history]
    assert len(marks) == len(set(marks))
    attempts = [step.attempt for step in progress.history]
    assert attempts == sorted(attempts)
    assert progress.attempt == 1 + sum(step.state is RequestState.RETRYING for step in progress.history)


def test_what_happens_to_a_request_moves_its_state_and_names_its_workers() -> None:
    log, progress = EventLog(), RequestProgress.new(RequestId("r"), at=0.0)
    decode, prefill = WorkerId("d"), WorkerId("p")
    chosen = WorkerChosen(worker=prefill, epoch=Epoch(1), tier="prefill", why="")
    started = DecodeStarted(worker=decode, queue_s=0.0, is_prefilled_locally=False, cached_tokens=0, computing_s=0.0)
    move = MoveStarted(number=1, reason="drain", source=decode, target=WorkerId("e"), is_copied=True)
    events = [
        Retried(reason="r", worker=decode, error=""),  # Twice, without a state of their own between them.
        Retried(reason="r", worker=decode, error=""),
        LocalPrefillOrdered(),  # It is a new one already.
        BlocksReserved(worker=decode, reserve_s=0.0),
        chosen,
        LocalPrefillOrdered(),
        started,
        move,
        MoveEnded(number=1, outcome=MigrationOutcome.MOVED),
        Ended.finished(["stop"]),
    ]
    for number, event in enumerate(events):
        progress = progress_after(progress, event, log, at=float(number))
        log.append(event, at=float(number), attempt=progress.attempt)
    marks = [step.mark for step in progress.history]
    assert marks == [
        "queued:1",
        "retrying:2",
        "retrying:3",
        "reserved:3",
        "prefilling:3",
        "retrying:4",
        "reserved:4",
        "decoding:4",
        "finished:4",
    ]
    assert (progress.prefill_worker, progress.decode_worker, progress.outcome) == ("p", "e", "stop")
    assert progress.story().startswith("queued:1 +0.000 s, retrying:2 +0.000 s, retrying:3 +1.000 s, reserved:3")
