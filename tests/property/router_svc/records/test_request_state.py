"""The request's state machine: every pair of states is either a legal transition or raises InvalidTransition."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import RequestId, WorkerId
from router_svc.records.request_state import RequestProgress, RequestState, StateChange

# A second copy on purpose: a change of the table must be a decision, not a slip.
LEGAL = {
    (RequestState(source), RequestState(target))
    for source, targets in {
        "queued": "scoring reserved prefilling finished retrying failed cancelled",
        "scoring": "reserved prefilling finished retrying failed cancelled",
        "reserved": "prefilling decoding retrying failed cancelled",
        "prefilling": "decoding finished retrying failed cancelled",
        "decoding": "finished retrying failed cancelled",
        "retrying": "queued scoring reserved prefilling failed cancelled",
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


def test_values_that_a_transition_omits_stay() -> None:
    progress = RequestProgress.new(RequestId("r"), at=0.0)
    progress = progress.advance(RequestState.RESERVED, at=1.0, decode_worker=WorkerId("d"))
    progress = progress.advance(RequestState.PREFILLING, at=2.0, prefill_worker=WorkerId("p"))
    progress = progress.advance(RequestState.FINISHED, at=3.5, outcome="stop")
    assert (progress.prefill_worker, progress.decode_worker, progress.outcome) == ("p", "d", "stop")
    assert progress.story() == "queued:1 +0.000 s, reserved:1 +1.000 s, prefilling:1 +2.000 s, finished:1 +3.500 s"
