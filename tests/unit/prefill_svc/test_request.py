"""The table of a prompt's moves, and the queues that follow it."""

from __future__ import annotations

import itertools

import pytest

from pdserve.base.errors import InvalidTransition
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from prefill_svc.request import TRANSITIONS, PrefillJob, PrefillPhase, PromptQueues, ScheduledPrompt

WAITING, COMPUTING, COMPUTED, STOPPED, RELEASED = PrefillPhase

#: Written out a second time, so that a changed table has to be changed here as well.
LEGAL = [
    (WAITING, COMPUTING),
    (WAITING, STOPPED),
    (WAITING, RELEASED),
    (COMPUTING, COMPUTED),
    (COMPUTING, STOPPED),
    (COMPUTING, RELEASED),
    (COMPUTED, STOPPED),
    (COMPUTED, RELEASED),
    (STOPPED, RELEASED),
]
ILLEGAL = [pair for pair in itertools.product(PrefillPhase, PrefillPhase) if pair not in LEGAL]


def prompt_in(phase: PrefillPhase, name: str = "a") -> ScheduledPrompt:
    job = PrefillJob(request_id=RequestId(name), prompt_token_ids=[1, 2], params=SamplingParams(), hash_key=bytes(32))
    return ScheduledPrompt(job=job, sequence=job.new_sequence(), num_cached=0, phase=phase)


def test_the_table_has_exactly_the_legal_moves() -> None:
    assert [(phase, after) for phase in PrefillPhase for after in PrefillPhase if after in TRANSITIONS[phase]] == LEGAL


@pytest.mark.parametrize(("phase", "after"), LEGAL)
def test_a_legal_move_changes_the_phase_and_the_queue(phase: PrefillPhase, after: PrefillPhase) -> None:
    queues, prompt = PromptQueues(), prompt_in(phase)
    queues.add(prompt)
    queues.move(prompt, after)
    assert prompt.phase is after
    assert list(queues) == ([] if after is RELEASED else [prompt])
    assert queues.find(RequestId("a")) is (None if after is RELEASED else prompt)
    if after is not RELEASED:
        assert list(queues.in_phase(after)) == [prompt]


@pytest.mark.parametrize(("phase", "after"), [pair for pair in ILLEGAL if pair[0] is not RELEASED])
def test_an_illegal_move_raises_and_changes_nothing(phase: PrefillPhase, after: PrefillPhase) -> None:
    queues, prompt = PromptQueues(), prompt_in(phase)
    queues.add(prompt)
    with pytest.raises(InvalidTransition, match=f"request a is {phase.value}: it cannot become {after.value}"):
        queues.move(prompt, after)
    assert prompt.phase is phase
    assert list(queues.in_phase(phase)) == list(queues) == [prompt]


@pytest.mark.parametrize("after", PrefillPhase)
def test_a_released_prompt_cannot_move(after: PrefillPhase) -> None:
    with pytest.raises(InvalidTransition):
        prompt_in(RELEASED).advance(after)


def test_each_queue_is_in_order_of_arrival() -> None:
    queues = PromptQueues()
    prompts = [prompt_in(WAITING, name) for name in "cab"]
    for prompt in prompts:
        queues.add(prompt)
    assert list(queues.in_phase(WAITING)) == prompts
    for prompt in (prompts[1], prompts[0]):
        queues.move(prompt, COMPUTING)
    assert list(queues.in_phase(COMPUTING)) == [prompts[1], prompts[0]]
    assert list(queues.in_phase(WAITING)) == [prompts[2]]
