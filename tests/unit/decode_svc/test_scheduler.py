from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from kernels.decoder import LayerListener
from pdserve.base.block_hash import hash_blocks
from pdserve.base.errors import InvalidTransition, NoFreeBlocks, RequestError
from pdserve.base.ids import NO_ROUTER, RequestId, RouterId
from pdserve.base.sampling import FinishReason, SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.pace import Pace
from pdserve.engine.sequence import SequenceLimits
from pdserve.engine.step import Grant, StepEvents
from pdserve.model.batch import Batch
from tests.unit.engine.fakes import (
    BLOCK_SIZE,
    EOS,
    KEY,
    VOCAB,
    FakeDecoder,
    Worker,
    expected,
    fake_logits,
    limits,
    write_prompt,
)

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
ALWAYS = 2**32 - 1
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


@dataclass
class DecodeWorker(Worker):
    """A decode worker whose scheduler is checked after every step."""

    scheduler: DecodeScheduler

    def step(self) -> StepEvents:
        events = super().step()
        self.scheduler.check_integrity()
        return events

    def grant(self, request_id: RequestId) -> Grant:
        """Step until nothing is left to do, or the request got its grant."""
        while self.scheduler.has_work():
            for grant in self.step().grants:
                if grant.request_id == request_id:
                    return grant
        raise AssertionError(f"{request_id} got no grant")

    def deliver(self, job: DecodeJob) -> Grant:
        """Reserve, and let the transfer arrive and be activated."""
        self.scheduler.reserve(job)
        grant = self.grant(job.request_id)
        write_prompt(self.cache, grant.block_table, grant.num_cached_blocks, job.prompt_token_ids)
        self.scheduler.activate(job.request_id, first_tokens(job))
        return grant

    @property
    def all_free(self) -> bool:
        return self.pool.num_free == self.pool.num_blocks


def decode(num_blocks: int = 32, *, decoder: FakeDecoder | None = None, **config: float) -> DecodeWorker:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    scheduler = DecodeScheduler(pool, replace(DecodeSchedulerConfig(limits=limits()), **config))
    return DecodeWorker(pool=pool, scheduler=scheduler, decoder=decoder or FakeDecoder())


def job(request_id: RequestId, prompt: list[int], params: SamplingParams = GREEDY, *, threshold: int = 0) -> DecodeJob:
    return DecodeJob(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        hash_key=KEY,
        local_prefill_threshold=threshold,
    )


def first_tokens(of: DecodeJob) -> list[int]:
    return [expected(of.prompt_token_ids, of.params, choice, limits())[0] for choice in range(of.params.n)]


def oracle(prompt: list[int], params: SamplingParams = GREEDY, choice: int = 0) -> list[int]:
    return expected(prompt, params, choice, limits())


# Reservations.
def test_a_grant_names_all_blocks_of_the_prompt_and_how_many_are_cached() -> None:
    worker = decode()
    first = worker.deliver(job(A, PROMPT))
    worker.run()
    worker.scheduler.reserve(job(B, [*PROMPT[:8], 20, 21, 22]))
    second = worker.grant(B)
    assert (len(first.block_table), first.num_cached_blocks) == (3, 0)
    assert (len(second.block_table), second.num_cached_blocks) == (3, 2)
    assert second.block_table[:2] == first.block_table[:2]


def test_a_prompt_of_whole_blocks_can_be_cached_as_a_whole() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT[:8]))
    worker.run()
    grant = worker.deliver(job(B, PROMPT[:8]))
    worker.run()
    assert grant.num_cached_blocks == len(grant.block_table) == 2
    assert worker.tokens(B) == oracle(PROMPT[:8])[1:]


def test_blocks_that_are_being_received_match_nobody() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT))
    worker.scheduler.reserve(job(B, PROMPT))
    events = worker.step()
    assert [grant.num_cached_blocks for grant in events.grants] == [0, 0]
    assert not set(events.grants[0].block_table) & set(events.grants[1].block_table)


def test_hashes_computed_before_are_used() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.run()
    worker.scheduler.reserve(replace(job(B, PROMPT), hashes=hash_blocks(KEY, PROMPT, BLOCK_SIZE)[:1]))
    assert worker.grant(B).num_cached_blocks == 2


def test_another_hash_key_finds_nothing() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.run()
    worker.scheduler.reserve(replace(job(B, PROMPT), hash_key=bytes([1] * 32)))
    assert worker.grant(B).num_cached_blocks == 0


def test_grants_come_in_order_and_a_large_request_is_not_overtaken() -> None:
    worker = decode(8, max_reserved_share=1.0)
    worker.scheduler.reserve(job(A, PROMPT))  # 3 blocks
    worker.scheduler.reserve(job(B, [*PROMPT, *PROMPT]))  # 6
    worker.scheduler.reserve(job(C, [1]))  # 1, would fit beside A
    assert [grant.request_id for events in worker.run() for grant in events.grants] == [A]
    worker.scheduler.abort(A)
    assert [grant.request_id for events in worker.run() for grant in events.grants] == [B, C]


def test_reservations_hold_at_most_their_share() -> None:
    worker = decode(16, max_reserved_share=0.5)
    for index in range(4):
        worker.scheduler.reserve(job(RequestId(f"r{index}"), [index, *PROMPT]))  # 3 blocks each, 8 allowed
    assert [grant.request_id for events in worker.run() for grant in events.grants] == ["r0", "r1"]
    worker.scheduler.abort(RequestId("r0"))
    assert [grant.request_id for events in worker.run() for grant in events.grants] == ["r2"]
    worker.scheduler.prefill_locally(RequestId("r1"))
    assert [grant.request_id for events in worker.run() for grant in events.grants] == ["r3"]


def test_one_request_may_exceed_the_share_when_nothing_else_is_here() -> None:
    worker = decode(8, max_reserved_share=0.25)
    worker.scheduler.reserve(job(A, [*PROMPT, *PROMPT]))
    assert len(worker.grant(A).block_table) == 5


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    worker = decode(2)
    with pytest.raises(NoFreeBlocks, match=r"needs 3 KV blocks for 8 prompt tokens .* has 2 in all"):
        worker.scheduler.reserve(job(A, PROMPT[:8]))
    assert not worker.scheduler.has_work()


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([], GREEDY),
        ([1] * 64, GREEDY),
        ([VOCAB], GREEDY),
        ([-1], GREEDY),
        ([1], replace(GREEDY, n=0)),
        ([1], replace(GREEDY, max_tokens=0)),
        ([1], replace(GREEDY, logit_bias={VOCAB: 1.0})),
        ([1], replace(GREEDY, stop_token_ids=(VOCAB,))),
    ],
)
def test_what_would_break_a_step_is_refused_at_the_door(prompt: list[int], params: SamplingParams) -> None:
    worker = decode()
    with pytest.raises(RequestError):
        worker.scheduler.reserve(job(A, prompt, params))
    assert not worker.scheduler.has_work()


def test_the_same_request_cannot_be_here_twice() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT))
    with pytest.raises(InvalidTransition, match="already on this worker"):
        worker.scheduler.reserve(job(A, PROMPT))


def test_waiting_for_blocks_is_not_work() -> None:
    worker = decode(4, max_reserved_share=1.0)
    worker.scheduler.reserve(job(A, PROMPT))
    worker.scheduler.reserve(job(B, PROMPT))
    worker.run(max_steps=2)
    assert worker.scheduler.load().num_waiting == 1


# Decoding.
def test_received_prompts_go_on_from_the_first_tokens_which_are_not_told_again() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    events = worker.run()
    assert worker.tokens(A) == oracle(PROMPT)[1:]
    assert worker.told[A][0][0].first_index == 1
    assert worker.told[A][0][-1].finish_reason is FinishReason.LENGTH
    assert [event.finished for event in events][-1] == (A,)
    assert worker.all_free


def test_started_is_told_once_with_how_the_prompt_came() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.scheduler.reserve(job(B, [*PROMPT, 11], threshold=ALWAYS))
    started = [(s.request_id, s.prefilled_locally, s.num_cached) for events in worker.run() for s in events.started]
    assert started == [(A, False, 0), (B, True, 8)]


def test_all_running_sequences_are_computed_in_every_step() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.deliver(job(B, PROMPT[:3]))
    worker.run()
    assert sum(len(plan.decoding) == 2 for plan in worker.plans) >= 4
    assert [worker.tokens(A), worker.tokens(B)] == [oracle(PROMPT)[1:], oracle(PROMPT[:3])[1:]]


def test_no_more_than_max_num_seqs_run_at_once_and_the_others_follow() -> None:
    worker = decode(max_num_seqs=2)
    for name in (A, B, C):
        worker.deliver(job(name, PROMPT))
    worker.run()
    assert max(len(plan.decoding) for plan in worker.plans) == 2
    assert [worker.tokens(name) for name in (A, B, C)] == [oracle(PROMPT)[1:]] * 3


def test_choices_share_the_prompt_and_copy_its_partial_block_when_they_write() -> None:
    worker = decode()
    params = SamplingParams(n=3, seed=11, max_tokens=7, ignore_eos=True)
    worker.deliver(job(A, PROMPT, params))
    worker.step()
    assert len(worker.plans[-1].copies) == 2
    assert worker.pool.num_blocks - worker.pool.num_free == 2 + 3
    worker.run()
    for choice in range(3):
        assert worker.tokens(A, choice) == oracle(PROMPT, params, choice)[1:]
    assert worker.all_free


def test_choices_of_a_prompt_of_whole_blocks_need_no_copy() -> None:
    worker = decode()
    params = SamplingParams(n=3, seed=11, max_tokens=7, ignore_eos=True)
    worker.deliver(job(A, PROMPT[:8], params))
    worker.run()
    assert not any(plan.copies for plan in worker.plans)
    assert [worker.tokens(A, c) for c in range(3)] == [oracle(PROMPT[:8], params, c)[1:] for c in range(3)]


def test_a_choice_that_ended_with_its_first_token_does_not_run() -> None:
    worker = decode()
    params = SamplingParams(n=2, seed=1, max_tokens=4)
    worker.scheduler.reserve(job(A, PROMPT, params))
    grant = worker.grant(A)
    write_prompt(worker.cache, grant.block_table, 0, PROMPT)
    worker.scheduler.activate(A, [EOS, 5])
    events = worker.run()
    assert set(worker.told[A]) == {1}
    assert events[-1].finished == (A,)


def test_a_request_whose_choices_all_ended_with_their_first_tokens_is_over_at_once() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, SamplingParams(max_tokens=1)))
    worker.grant(A)
    worker.scheduler.activate(A, [3])
    assert worker.all_free
    assert [events.finished for events in worker.run()] == [(A,)]


def test_generated_blocks_can_be_reused_by_the_next_turn() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.run()
    conversation = [*PROMPT, *oracle(PROMPT), 9]
    worker.scheduler.reserve(job(B, conversation))
    # 10 + 6 tokens, of which the last one's KV was never computed.
    assert worker.grant(B).num_cached_blocks == 3


# How it ends.
def bias_towards(token: int, **more: object) -> SamplingParams:
    return replace(GREEDY, max_tokens=9, logit_bias={token: 100.0}, **more)


def test_eos_ends_a_sequence_and_is_told() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, bias_towards(EOS, ignore_eos=False), threshold=ALWAYS))
    worker.run()
    (told,) = worker.told[A][0]
    assert (told.token_ids, told.finish_reason, told.stop_token_id) == ((EOS,), FinishReason.STOP, EOS)


def test_ignored_eos_is_a_token_like_others() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, bias_towards(EOS), threshold=ALWAYS))
    worker.run()
    assert worker.tokens(A) == [EOS] * 9


def test_min_tokens_holds_back_eos_and_stop_tokens() -> None:
    worker = decode()
    params = bias_towards(EOS, ignore_eos=False, min_tokens=4, stop_token_ids=(3,))
    worker.scheduler.reserve(job(A, PROMPT, params, threshold=ALWAYS))
    worker.run()
    tokens = worker.tokens(A)
    assert len(tokens) == 5
    assert tokens[-1] == EOS
    assert not {EOS, 3} & {*tokens[:-1]}


def test_a_stop_token_ends_even_when_eos_is_ignored() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, bias_towards(3, stop_token_ids=(3,)), threshold=ALWAYS))
    worker.run()
    assert worker.told[A][0][-1].stop_token_id == 3


def test_a_sequence_ends_at_the_models_length() -> None:
    worker = decode(limits=limits(max_model_len=14))
    worker.scheduler.reserve(job(A, PROMPT, replace(GREEDY, max_tokens=99), threshold=ALWAYS))
    worker.run()
    assert worker.told[A][0][-1].finish_reason is FinishReason.LENGTH
    assert len(worker.tokens(A)) == 4


def test_a_lone_sequence_that_outgrows_the_pool_ends_with_length() -> None:
    worker = decode(4)
    worker.scheduler.reserve(job(A, PROMPT, replace(GREEDY, max_tokens=50), threshold=ALWAYS))
    worker.run()
    assert worker.told[A][0][-1].finish_reason is FinishReason.LENGTH
    assert len(worker.tokens(A)) == 4 * BLOCK_SIZE + 1 - len(PROMPT)
    assert worker.scheduler.load().num_preemptions == 0
    assert worker.all_free


# Local prefill.
def test_a_small_uncached_part_is_computed_here_without_a_grant() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, threshold=9))
    assert worker.grant(A)  # 10 tokens are more than 9
    worker.scheduler.abort(A)
    worker.scheduler.reserve(job(B, PROMPT, threshold=10))
    assert not any(events.grants for events in worker.run())
    assert worker.tokens(B) == oracle(PROMPT)
    worker.scheduler.reserve(job(C, PROMPT, threshold=2))
    assert not any(events.grants for events in worker.run())
    assert worker.tokens(C) == oracle(PROMPT)


def test_a_prompt_with_more_blocks_than_can_be_received_is_computed_here() -> None:
    worker = decode(max_receivable_blocks=3)
    worker.scheduler.reserve(job(A, PROMPT))
    assert worker.grant(A)  # 10 tokens are 3 blocks
    worker.scheduler.reserve(job(B, [7, *PROMPT]))
    worker.scheduler.reserve(job(C, [8, *PROMPT, *PROMPT]))
    assert not worker.step().grants  # B has to wait for the room that A takes
    worker.scheduler.abort(A)
    assert worker.grant(B)
    worker.run()
    assert worker.tokens(C) == oracle([8, *PROMPT, *PROMPT])


def test_threshold_zero_never_computes_here_even_when_all_is_cached() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT[:8]))
    worker.run()
    worker.scheduler.reserve(job(B, PROMPT[:8]))
    assert worker.grant(B).num_cached_blocks == 2


def sizes(worker: DecodeWorker) -> list[dict[RequestId, int]]:
    """Tokens of each request in each step, until nothing is left to do."""
    result = []
    while worker.scheduler.has_work():
        worker.step()
        plan = worker.plans[-1]
        chunks = {chunk.sequence.request_id: chunk.stop - chunk.start for chunk in plan.chunks}
        result.append({sequence.request_id: 1 for sequence in plan.decoding} | chunks)
    return result


def test_local_prefill_is_cut_to_the_itl_budget_beside_running_sequences_and_to_max_num_batched_tokens_alone() -> None:
    worker = decode(itl_budget_s=0.010, max_num_batched_tokens=7)
    worker.pace = Pace(decode_step_s=0.004, prefill_token_s=0.001)
    worker.deliver(job(A, PROMPT[:3], replace(GREEDY, max_tokens=4)))
    worker.scheduler.reserve(job(B, [*PROMPT, *PROMPT, *PROMPT[:5]], threshold=ALWAYS))
    seen = sizes(worker)
    assert seen[:6] == [{A: 1, B: 6}, {A: 1, B: 6}, {A: 1, B: 6}, {B: 7}, {B: 1}, {B: 1}]
    assert [p.num_computed for events in worker.seen for p in events.progress] == [6, 12, 18, 25]
    assert worker.tokens(B) == oracle([*PROMPT, *PROMPT, *PROMPT[:5]])


def test_local_prefill_is_cut_while_a_transfer_is_awaited_whose_stream_has_begun() -> None:
    worker = decode(itl_budget_s=0.010, max_num_batched_tokens=7)
    worker.pace = Pace(decode_step_s=0.004, prefill_token_s=0.001)
    worker.scheduler.reserve(job(A, PROMPT))
    worker.grant(A)
    worker.scheduler.reserve(job(B, [*PROMPT, *PROMPT], threshold=ALWAYS))
    assert sizes(worker)[:3] == [{B: 6}, {B: 6}, {B: 6}]
    worker.scheduler.abort(A)
    worker.scheduler.reserve(job(C, [7, *PROMPT, *PROMPT], threshold=ALWAYS))
    assert sizes(worker)[:2] == [{C: 7}, {C: 7}]


@pytest.mark.parametrize(
    "pace", [Pace(decode_step_s=9.0, prefill_token_s=9.0), Pace(decode_step_s=0.0, prefill_token_s=9.0)]
)
def test_prefill_gets_on_by_a_block_a_step_where_the_itl_budget_has_no_room(pace: Pace) -> None:
    worker = decode(itl_budget_s=0.010)
    worker.pace = pace
    worker.deliver(job(A, PROMPT[:3]))
    worker.scheduler.reserve(job(B, PROMPT, threshold=ALWAYS))
    assert sizes(worker)[:4] == [{A: 1, B: 4}, {A: 1, B: 4}, {A: 1, B: 2}, {A: 1, B: 1}]


def test_prompts_share_the_itl_budget_the_oldest_first() -> None:
    worker = decode(itl_budget_s=0.010)
    worker.pace = Pace(decode_step_s=0.004, prefill_token_s=0.001)
    worker.deliver(job(A, PROMPT[:3]))
    worker.scheduler.reserve(job(B, PROMPT, threshold=ALWAYS))
    worker.scheduler.reserve(job(C, [7, *PROMPT], threshold=ALWAYS))
    assert sizes(worker)[:4] == [{A: 1, B: 6}, {A: 1, B: 4, C: 2}, {A: 1, B: 1, C: 6}, {A: 1, B: 1, C: 3}]


def test_the_last_token_of_a_prompt_is_prefill_though_it_is_one() -> None:
    worker = decode(max_num_batched_tokens=3)
    worker.scheduler.reserve(job(A, PROMPT, threshold=ALWAYS))
    worker.run()
    assert [plan.num_prefill_tokens for plan in worker.plans[:5]] == [3, 3, 3, 1, 0]


def test_a_granted_request_whose_transfer_failed_is_computed_here() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT))
    worker.grant(A)
    worker.scheduler.prefill_locally(A)
    worker.run()
    assert worker.tokens(A) == oracle(PROMPT)


def test_a_granted_request_found_in_the_cache_as_a_whole_recomputes_its_last_block_only() -> None:
    worker = decode(5)
    worker.deliver(job(A, PROMPT[:8]))
    worker.run()
    worker.scheduler.reserve(job(B, PROMPT[:8]))
    worker.grant(B)
    before = len(worker.plans)
    worker.scheduler.prefill_locally(B)
    worker.scheduler.check_integrity()
    worker.run()
    assert (worker.plans[before].chunks[0].start, worker.plans[before].chunks[0].stop) == (4, 8)
    assert worker.tokens(B) == oracle(PROMPT[:8])


def test_local_prefill_can_be_asked_for_while_waiting_for_blocks() -> None:
    worker = decode(4, max_reserved_share=1.0)
    worker.scheduler.reserve(job(A, PROMPT))
    worker.scheduler.reserve(job(B, [2, *PROMPT]))
    worker.run()
    worker.scheduler.prefill_locally(B)
    worker.run()
    assert worker.tokens(B) == []
    worker.scheduler.abort(A)
    worker.run()
    assert worker.tokens(B) == oracle([2, *PROMPT])


@pytest.mark.parametrize("n", [1, 3])
def test_forced_first_tokens_are_taken_instead_of_sampled_and_not_told(n: int) -> None:
    params = SamplingParams(n=n, seed=11, max_tokens=7, ignore_eos=True)
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, params))
    worker.grant(A)
    worker.scheduler.prefill_locally(A, first_tokens(job(A, PROMPT, params)))
    worker.run()
    for choice in range(n):
        assert worker.told[A][choice][0].first_index == 1
        assert worker.tokens(A, choice) == oracle(PROMPT, params, choice)[1:]


def test_local_choices_are_told_from_their_first_token() -> None:
    params = SamplingParams(n=3, seed=11, max_tokens=7, ignore_eos=True, logprobs=2)
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, params, threshold=ALWAYS))
    worker.run()
    for choice in range(3):
        assert worker.tokens(A, choice) == oracle(PROMPT, params, choice)
        assert all(len(told.logprobs) == 1 for told in worker.told[A][choice])


@pytest.mark.parametrize("tokens", [[], [1, 2], [VOCAB], [-1]])
def test_first_tokens_that_cannot_be_are_refused_and_the_reservation_stays(tokens: list[int]) -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT))
    worker.grant(A)
    with pytest.raises(RequestError):
        worker.scheduler.activate(A, tokens)
    worker.scheduler.check_integrity()
    assert worker.scheduler.load().num_held == 1


def test_moves_that_the_phase_does_not_allow_are_refused() -> None:
    worker = decode()
    with pytest.raises(InvalidTransition, match="not on this worker"):
        worker.scheduler.activate(A, [1])
    worker.scheduler.reserve(job(A, PROMPT))
    with pytest.raises(InvalidTransition, match="waiting for blocks"):
        worker.scheduler.activate(A, [1])
    worker.grant(A)
    worker.scheduler.activate(A, [1])
    for move in (lambda: worker.scheduler.activate(A, [1]), lambda: worker.scheduler.prefill_locally(A)):
        with pytest.raises(InvalidTransition, match="is running"):
            move()


# Preemption.
def test_the_youngest_gives_way_and_later_goes_on_as_if_nothing_had_been() -> None:
    worker = decode(8)
    params = replace(GREEDY, max_tokens=16)
    prompts = {A: PROMPT, B: [3, *PROMPT[:7]]}
    for name, prompt in prompts.items():
        worker.scheduler.reserve(job(name, prompt, params, threshold=ALWAYS))
    preempted = [request_id for events in worker.run() for request_id in events.preempted]
    assert preempted
    assert set(preempted) == {B}
    assert worker.scheduler.load().num_preemptions == len(preempted)
    for name, prompt in prompts.items():
        assert worker.tokens(name) == oracle(prompt, params)
    assert worker.all_free


def test_choices_of_one_request_are_preempted_one_by_one() -> None:
    worker = decode(8)
    params = SamplingParams(n=3, seed=2, max_tokens=14, ignore_eos=True)
    worker.scheduler.reserve(job(A, PROMPT, params, threshold=ALWAYS))
    events = worker.run()
    assert sum(len(event.preempted) for event in events) > 0
    for choice in range(3):
        assert worker.tokens(A, choice) == oracle(PROMPT, params, choice)


def test_a_preempted_sequence_finds_its_own_blocks_in_the_cache() -> None:
    worker = decode(8)
    params = replace(GREEDY, max_tokens=16)
    worker.scheduler.reserve(job(A, PROMPT, replace(params, max_tokens=12), threshold=ALWAYS))
    worker.scheduler.reserve(job(B, [3, *PROMPT[:7]], params, threshold=ALWAYS))
    resumed = []
    while worker.scheduler.has_work():
        worker.step()
        resumed += [c.start for c in worker.plans[-1].chunks if c.sequence.num_output > 1 and c.stop - c.start > 1]
    assert any(start > 0 for start in resumed)


def test_nothing_new_is_granted_while_somebody_waits_to_come_back() -> None:
    worker = decode(6, max_reserved_share=1.0)
    worker.scheduler.reserve(job(A, PROMPT, replace(GREEDY, max_tokens=13), threshold=ALWAYS))
    worker.step()
    worker.scheduler.reserve(job(B, [5] * 5))
    assert worker.grant(B)
    worker.scheduler.reserve(job(C, [6]))
    while not worker.step().preempted:
        assert worker.scheduler.has_work()
    # A gave way to B's transfer; B's blocks come free, and A is served before C.
    worker.run()
    worker.scheduler.abort(B)
    assert worker.step().grants == ()
    assert [sequence.request_id for sequence in worker.plans[-1].scheduled()] == [A]
    worker.run()
    assert worker.tokens(A) == oracle(PROMPT, replace(GREEDY, max_tokens=13))


# Ending from outside.
@pytest.mark.parametrize("phase", ["waiting", "reserved", "computing", "running", "preempted", "over"])
def test_abort_frees_everything_in_every_phase(phase: str) -> None:
    worker = decode(6, max_num_batched_tokens=4, max_reserved_share=1.0)
    params = SamplingParams(n=2, seed=1, max_tokens=12, ignore_eos=True)
    worker.scheduler.reserve(job(A, PROMPT, params, threshold=0 if phase == "reserved" else ALWAYS))
    if phase in ("reserved", "computing"):
        worker.step()
    elif phase == "running":
        while not worker.told.get(A):
            worker.step()
    elif phase == "preempted":
        while not worker.step().preempted:
            assert worker.scheduler.has_work()
    elif phase == "over":
        worker.run()
    assert worker.scheduler.abort(A) is (phase != "over")
    worker.scheduler.check_integrity()
    assert worker.all_free
    assert not worker.scheduler.abort(A)
    assert not worker.scheduler.has_work()


def test_nothing_is_told_of_an_aborted_request_so_its_id_can_be_used_again() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.step()
    worker.scheduler.stop_choice(A, 0)
    assert not worker.scheduler.abort(A)
    worker.deliver(job(A, PROMPT[:5]))
    worker.run()
    assert [request_id for events in worker.seen for request_id in events.finished] == [A]
    assert worker.all_free


def test_a_stopped_choice_frees_its_blocks_and_the_others_go_on() -> None:
    worker = decode()
    params = SamplingParams(n=2, seed=11, max_tokens=9, ignore_eos=True)
    worker.deliver(job(A, PROMPT, params))
    worker.step()
    worker.scheduler.stop_choice(A, 0)
    worker.scheduler.check_integrity()
    events = worker.run()
    assert len(worker.tokens(A, 0)) == 1
    assert worker.tokens(A, 1) == oracle(PROMPT, params, 1)[1:]
    assert events[-1].finished == (A,)


def test_stopping_the_last_choice_ends_the_request() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.step()
    worker.scheduler.stop_choice(A, 0)
    worker.scheduler.stop_choice(A, 0)
    assert worker.all_free
    assert [events.finished for events in worker.run()] == [(A,)]


def test_a_choice_stopped_before_its_kv_arrived_never_runs() -> None:
    worker = decode()
    params = SamplingParams(n=2, seed=11, max_tokens=9, ignore_eos=True)
    worker.scheduler.reserve(job(A, PROMPT, params))
    grant = worker.grant(A)
    worker.scheduler.stop_choice(A, 1)
    write_prompt(worker.cache, grant.block_table, 0, PROMPT)
    worker.scheduler.activate(A, first_tokens(job(A, PROMPT, params)))
    worker.run()
    assert set(worker.told[A]) == {0}
    assert worker.all_free


def test_a_granted_request_keeps_its_blocks_when_stopped_until_the_transfer_is_settled() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT))
    worker.grant(A)
    worker.scheduler.stop_choice(A, 0)
    assert not worker.all_free
    worker.scheduler.activate(A, [1])
    assert worker.all_free
    assert [events.finished for events in worker.run()] == [(A,)]


@pytest.mark.parametrize("is_computing", [False, True])
def test_stopping_all_choices_before_the_first_token_ends_the_request(is_computing: bool) -> None:
    worker = decode(max_num_batched_tokens=4)
    worker.scheduler.reserve(job(A, PROMPT, threshold=ALWAYS))
    if is_computing:
        worker.step()
    worker.scheduler.stop_choice(A, 0)
    assert worker.all_free
    assert [events.finished for events in worker.run()] == [(A,)]


def test_stopping_what_is_unknown_changes_nothing() -> None:
    worker = decode()
    worker.scheduler.stop_choice(A, 0)
    worker.deliver(job(A, PROMPT))
    worker.scheduler.stop_choice(A, 5)
    worker.run()
    assert worker.tokens(A) == oracle(PROMPT)[1:]


# Faults.
class NanAfter(FakeDecoder):
    """Logits are NaN for every sequence whose context starts with `poison`."""

    def __init__(self, poison: int) -> None:
        self._poison = poison

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        logits = super().forward(batch, kv_cache)
        first_blocks = batch.block_tables[:, 0]
        is_poisoned = kv_cache[first_blocks, 0, 0, 0, 0, 0] == self._poison
        per_row = torch.repeat_interleave(is_poisoned, batch.query_starts.diff())
        logits[per_row[batch.logits_rows]] = float("nan")
        return logits


def test_nan_logits_fail_their_request_and_no_other() -> None:
    worker = decode(decoder=NanAfter(30))
    params = SamplingParams(n=2, seed=11, max_tokens=5, ignore_eos=True)
    worker.deliver(job(A, [30, 1, 2], params))
    worker.scheduler.reserve(job(B, [30, 1, 2, 3, 4], params, threshold=ALWAYS))
    worker.deliver(job(C, PROMPT))
    worker.run()
    failures = [failure for events in worker.seen for failure in events.failures]
    assert {failure.request_id for failure in failures} == {A, B}
    assert "have no finite maximum" in str(failures[0].error)
    assert worker.tokens(C) == oracle(PROMPT)[1:]
    assert worker.all_free


def test_the_load_counts_who_runs_who_waits_and_what_is_queued() -> None:
    worker = decode(16, max_num_seqs=1, max_reserved_share=0.25)
    worker.deliver(job(A, PROMPT))
    worker.deliver(job(B, PROMPT))
    worker.scheduler.reserve(job(C, [2, *PROMPT]))
    worker.step()
    worker.scheduler.reserve(job(RequestId("d"), [3, *PROMPT]))
    load = worker.scheduler.load()
    assert (load.num_running, load.num_waiting, load.num_held) == (1, 2, 1)
    # What the prefill tier will compute is not queued here.
    assert (load.queued_prompt_tokens, load.queued_by_router, load.total_blocks) == (0, {}, 16)
    worker.scheduler.prefill_locally(RequestId("d"))
    assert worker.scheduler.load().queued_prompt_tokens == 11
    assert worker.scheduler.load().queued_by_router == {NO_ROUTER: 11}
    assert load.free_blocks == worker.pool.num_free
    assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (31, 8)


def test_the_load_tells_whose_prompts_are_queued_until_their_first_token() -> None:
    worker = decode(16, max_num_batched_tokens=4)
    for request_id, router in ((A, "one"), (B, "two"), (C, "one")):
        asked = job(request_id, [11 + ord(request_id) % 3, *PROMPT], threshold=ALWAYS if request_id != C else 0)
        worker.scheduler.reserve(replace(asked, router_id=RouterId(router)))
    worker.step()
    # C waits for what the prefill tier computes, and has it computed here after all.
    assert worker.scheduler.load().queued_by_router == {"one": 7, "two": 11}
    worker.scheduler.prefill_locally(C)
    load = worker.scheduler.load()
    assert load.queued_by_router == {"one": 7 + 11, "two": 11}
    assert load.queued_prompt_tokens == 7 + 11 + 11
    while C not in worker.told:
        worker.step()
    assert worker.scheduler.load().num_running > 0
    assert worker.scheduler.load().queued_by_router == {}


def test_a_last_token_is_in_nobodys_way() -> None:
    worker = decode(max_num_batched_tokens=9)
    worker.scheduler.reserve(job(A, PROMPT, threshold=ALWAYS))
    worker.step()
    load = worker.scheduler.load()
    assert (load.queued_prompt_tokens, load.queued_by_router) == (0, {})


def test_what_a_preempted_sequence_computes_again_is_no_routers_prompt() -> None:
    worker = decode(8)
    for name, prompt in ((A, PROMPT), (B, [3, *PROMPT[:7]])):
        worker.scheduler.reserve(job(name, prompt, replace(GREEDY, max_tokens=16), threshold=ALWAYS))
    while not worker.scheduler.load().num_preemptions:
        worker.step()
    load = worker.scheduler.load()
    assert load.queued_prompt_tokens > 8
    assert load.queued_by_router == {}


def test_limits_are_those_of_the_model_even_when_the_pool_is_larger() -> None:
    bounds = SequenceLimits(max_model_len=8, vocab_size=VOCAB)
    worker = decode(64, limits=bounds)
    with pytest.raises(RequestError, match=r"has 8 tokens \(limit 7"):
        worker.scheduler.reserve(job(A, PROMPT[:8]))


def test_the_fake_model_tells_contexts_apart() -> None:
    assert not torch.equal(fake_logits([1, 2, 3]), fake_logits([1, 3, 2]))
