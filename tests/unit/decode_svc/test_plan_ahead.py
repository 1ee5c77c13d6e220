"""When the step after the one in flight can be planned, and what becomes of sequences that end in between."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pdserve.base.ids import AttemptId
from pdserve.base.sampling import FinishReason, SamplingParams
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import Sampled, SampleFailure, SampleResult
from pdserve.engine.step import StepPlan
from tests.unit.decode_svc.decode_worker import ALWAYS, GREEDY, PROMPT, A, B, C, DecodeWorker, decode, job
from tests.unit.engine.fakes import BLOCK_SIZE, EOS, limits

LONG = replace(GREEDY, max_tokens=40)


def step_in_flight(worker: DecodeWorker) -> StepPlan:
    """Plan a step, which is then in flight."""
    plan = worker.scheduler.schedule(Pace())
    worker.scheduler.check_integrity()
    return plan


def ahead_of(worker: DecodeWorker, plan: StepPlan) -> StepPlan | None:
    ahead = worker.scheduler.plan_ahead(plan)
    worker.scheduler.check_integrity()
    return ahead


def decoding(*params: SamplingParams, num_blocks: int = 32, **config: float) -> DecodeWorker:
    """A worker whose requests decode: A with the whole prompt, B with one token less, and so on."""
    worker = decode(num_blocks, **config)
    for index, each in enumerate(params):
        worker.deliver(job((A, B, C)[index], PROMPT[: len(PROMPT) - index], each))
    return worker


def test_the_next_step_has_the_same_sequences_and_their_slots() -> None:
    worker = decoding(LONG, LONG)
    plan = step_in_flight(worker)
    ahead = ahead_of(worker, plan)
    assert ahead == StepPlan(decoding=plan.decoding, is_ahead=True)
    assert all(sequence.num_slots > len(sequence.tokens) for sequence in plan.decoding)
    # Once the tokens of this step are known, another one can be planned.
    worker.scheduler.update(plan, [Sampled(token_id=1), Sampled(token_id=2)])
    assert ahead_of(worker, ahead) == ahead


def test_no_step_is_planned_after_the_last_token_of_a_sequence() -> None:
    worker = decoding(LONG, replace(LONG, max_tokens=2))
    assert ahead_of(worker, step_in_flight(worker)) is None


@pytest.mark.parametrize("changes", [{"max_tokens": 3}, {"repetition_penalty": 1.1}, {"presence_penalty": 0.1}])
def test_neither_a_later_max_tokens_nor_a_penalty_prevents_planning_ahead(changes: dict[str, Any]) -> None:
    worker = decoding(LONG, replace(LONG, **changes))
    assert ahead_of(worker, step_in_flight(worker)) is not None


def test_no_step_is_planned_beyond_the_models_length() -> None:
    tokens = {len(PROMPT) + 2: False, len(PROMPT) + 3: True}
    for max_model_len, is_planned in tokens.items():
        worker = decode(limits=limits(max_model_len))
        worker.deliver(job(A, PROMPT, LONG))
        assert (ahead_of(worker, step_in_flight(worker)) is not None) is is_planned


def test_no_step_is_planned_behind_one_with_a_chunk() -> None:
    worker = decoding(LONG)
    worker.scheduler.reserve(job(B, [9, 8, 7], threshold=ALWAYS))
    plan = step_in_flight(worker)
    assert plan.decoding
    assert plan.chunks
    assert ahead_of(worker, plan) is None


def test_no_step_is_planned_behind_an_empty_one() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT))
    plan = step_in_flight(worker)
    assert plan == StepPlan()
    assert ahead_of(worker, plan) is None


def test_planning_ahead_preempts_nothing_and_takes_no_block_unless_all_sequences_get_theirs() -> None:
    # Two sequences at the ends of their blocks, and one block left.
    worker = decode(5)
    worker.deliver(job(A, list(range(1, 2 * BLOCK_SIZE - 1)), LONG))  # One step further when B is granted.
    worker.deliver(job(B, list(range(11, 10 + 2 * BLOCK_SIZE)), LONG))
    plan = step_in_flight(worker)
    assert [sequence.num_slots - len(sequence.tokens) for sequence in plan.decoding] == [0, 0]
    assert worker.pool.num_free == 1
    assert ahead_of(worker, plan) is None
    assert worker.pool.num_free == 1
    assert worker.scheduler.load().num_preemptions == 0


def results_ending_with(worker: DecodeWorker, result: SampleResult) -> list[SampleResult]:
    """An ordinary token for every sequence but the last, which gets `result`."""
    return [Sampled(token_id=1)] * (worker.scheduler.load().num_running - 1) + [result]


@pytest.mark.parametrize("result", [Sampled(token_id=EOS), SampleFailure(reason="it is NaN")])
def test_results_of_a_step_in_flight_for_a_sequence_that_ended_are_dropped(result: SampleResult) -> None:
    worker = decoding(LONG, replace(LONG, ignore_eos=False))
    plan = step_in_flight(worker)
    ahead = ahead_of(worker, plan)
    assert ahead is not None
    first = worker.scheduler.update(plan, results_ending_with(worker, result))
    assert [*(each.request_id for each in first.finished), *(failure.request_id for failure in first.failures)] == [B]
    # A waiting request may get the blocks of B, but not while the step in flight writes to them.
    assert ahead_of(worker, ahead) is None
    second = worker.scheduler.update(ahead, [Sampled(token_id=3), Sampled(token_id=4)])
    worker.scheduler.check_integrity()
    assert [(tokens.request_id, tokens.choices[0].token_ids) for tokens in second.tokens] == [(A, (3,))]
    assert not second.failures
    assert not second.finished
    assert [sequence.request_id for sequence in step_in_flight(worker).decoding] == [A]


def test_results_of_a_choice_that_ended_are_dropped_and_the_other_choices_continue() -> None:
    worker = decoding(replace(LONG, n=3, ignore_eos=False))
    plan = step_in_flight(worker)
    ahead = ahead_of(worker, plan)
    assert ahead is not None
    worker.scheduler.update(plan, [Sampled(token_id=1), Sampled(token_id=EOS), Sampled(token_id=2)])
    events = worker.scheduler.update(ahead, [Sampled(token_id=token) for token in (3, EOS, 4)])
    worker.scheduler.check_integrity()
    (reported,) = events.tokens
    assert [(choice.choice_index, choice.token_ids) for choice in reported.choices] == [(0, (3,)), (2, (4,))]


def test_when_a_choice_fails_the_step_in_flight_gives_no_tokens_for_its_request() -> None:
    worker = decoding(replace(LONG, n=2))
    plan = step_in_flight(worker)
    ahead = ahead_of(worker, plan)
    assert ahead is not None
    worker.scheduler.update(plan, [Sampled(token_id=1), SampleFailure(reason="it is NaN")])
    assert worker.all_free
    events = worker.scheduler.update(ahead, [Sampled(token_id=1), Sampled(token_id=1)])
    assert (events.tokens, events.failures, events.finished) == ((), (), ())


def test_a_sequence_can_end_in_a_step_that_was_planned_ahead() -> None:
    worker = decoding(replace(LONG, max_tokens=3))
    plan = step_in_flight(worker)
    ahead = ahead_of(worker, plan)
    assert ahead is not None
    worker.scheduler.update(plan, [Sampled(token_id=1)])
    assert ahead_of(worker, ahead) is None
    events = worker.scheduler.update(ahead, [Sampled(token_id=2)])
    assert events.tokens[0].choices[0].finish_reason is FinishReason.LENGTH
    assert worker.all_free


def test_a_request_that_waits_for_blocks_prevents_planning_only_when_something_has_changed() -> None:
    worker = decoding(LONG, LONG, num_blocks=8)
    worker.scheduler.reserve(job(C, [20] * 20))
    plan = step_in_flight(worker)
    assert worker.scheduler.load().num_waiting == 1
    ahead = ahead_of(worker, plan)
    assert ahead is not None
    for each in (plan, ahead):
        worker.scheduler.update(each, [Sampled(token_id=1)] * 2)
    plan = step_in_flight(worker)
    worker.scheduler.stop_choice(B, 0)
    assert ahead_of(worker, plan) is None


def test_sequences_beyond_max_num_seqs_do_not_prevent_planning_ahead() -> None:
    worker = decoding(LONG, LONG, LONG, max_num_seqs=2)
    plan = step_in_flight(worker)
    assert len(plan.decoding) == 2
    assert ahead_of(worker, plan) is not None


def test_a_block_enters_the_prefix_index_when_its_tokens_are_known() -> None:
    worker, published = decoding(LONG), []
    for _ in range(3):
        plan = step_in_flight(worker)
        ahead = ahead_of(worker, plan)
        assert ahead is not None
        events = [worker.scheduler.update(each, [Sampled(token_id=1)]) for each in (plan, ahead)]
        published += [len(each.cache.added) for each in events]
    # 11 tokens at first: two full blocks of the prompt. The 12th token fills the third block, the 16th the fourth.
    assert published == [2, 1, 0, 0, 0, 1]


def test_blocks_of_an_ended_request_are_granted_only_when_no_step_writes_to_them_any_more() -> None:
    worker = decoding(LONG, replace(LONG, ignore_eos=False), num_blocks=9)
    worker.scheduler.reserve(job(C, [20] * 15))
    plan = step_in_flight(worker)
    ahead = ahead_of(worker, plan)
    assert ahead is not None
    written = {sequence.block_table[len(sequence.tokens) // BLOCK_SIZE] for sequence in plan.decoding}
    first = worker.scheduler.update(plan, [Sampled(token_id=1), Sampled(token_id=EOS)])
    second = worker.scheduler.update(ahead, [Sampled(token_id=1)] * 2)
    assert (first.finished, first.grants, second.grants) == ((AttemptId(B, 0),), (), ())
    step_in_flight(worker)
    (grant,) = worker.scheduler.update(StepPlan(), []).grants
    assert written & set(grant.block_tables[0])
