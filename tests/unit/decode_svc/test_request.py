"""The table of a decode request's moves: each legal move leads where it says, every other one is refused."""

from __future__ import annotations

import itertools

import pytest

from decode_svc.request import TRANSITIONS, DecodeJob, DecodeMove, DecodePhase, ScheduledRequest
from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams

WAITING, RESERVED, COMPUTING, RUNNING, OVER = DecodePhase
GRANT, COMPUTE, ACTIVATE, RUN, FINISH, FAIL, ABORT = DecodeMove

#: Written out a second time, so that a changed table has to be changed here as well.
LEGAL = {
    WAITING: {GRANT: RESERVED, COMPUTE: COMPUTING, FINISH: OVER, ABORT: OVER},
    RESERVED: {COMPUTE: COMPUTING, ACTIVATE: RUNNING, ABORT: OVER},
    COMPUTING: {RUN: RUNNING, FINISH: OVER, FAIL: OVER, ABORT: OVER},
    RUNNING: {FINISH: OVER, FAIL: OVER, ABORT: OVER},
    OVER: {},
}
EVERY_PAIR = list(itertools.product(DecodePhase, DecodeMove))


def request_in(phase: DecodePhase) -> ScheduledRequest:
    job = DecodeJob(request_id=RequestId("a"), prompt_token_ids=[1, 2], params=SamplingParams(), hash_key=bytes(32))
    return ScheduledRequest(job=job, prompt_sequence=job.new_sequence(), phase=phase)


def test_the_table_has_exactly_the_legal_moves() -> None:
    assert {(phase, move): after for phase, moves in LEGAL.items() for move, after in moves.items()} == TRANSITIONS


@pytest.mark.parametrize(("phase", "move"), [pair for pair in EVERY_PAIR if pair[1] in LEGAL[pair[0]]])
def test_a_legal_move_leads_to_its_phase(phase: DecodePhase, move: DecodeMove) -> None:
    request = request_in(phase)
    assert request.allows(move)
    request.require(move)
    assert request.phase is phase
    request.advance(move)
    assert request.phase is LEGAL[phase][move]


@pytest.mark.parametrize(("phase", "move"), [pair for pair in EVERY_PAIR if pair[1] not in LEGAL[pair[0]]])
def test_an_illegal_move_raises_and_changes_nothing(phase: DecodePhase, move: DecodeMove) -> None:
    request = request_in(phase)
    assert not request.allows(move)
    for attempt in (request.require, request.advance):
        with pytest.raises(InvalidTransition, match=rf"Request a is {phase.value}, but {move.value} needs"):
            attempt(move)
    assert request.phase is phase


def test_an_illegal_move_is_refused_with_the_phases_that_allow_it() -> None:
    with pytest.raises(InvalidTransition) as refused:
        request_in(RUNNING).advance(COMPUTE)
    assert str(refused.value) == (
        "Request a is running, but local prefill needs a request that is waiting for blocks or waiting for its KV."
    )


def test_every_phase_but_the_last_can_be_aborted_and_leads_to_the_last() -> None:
    reachable = {WAITING}
    while grown := {after for (phase, _), after in TRANSITIONS.items() if phase in reachable} - reachable:
        reachable |= grown
    assert reachable == set(DecodePhase)
    assert {phase for phase in DecodePhase if not request_in(phase).allows(ABORT)} == {OVER}
