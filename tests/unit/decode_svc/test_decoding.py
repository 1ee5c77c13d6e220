"""Received prompts are decoded together, choice by choice, until a token ends each of them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.base.ids import AttemptId
from pdserve.base.sampling import FinishReason, SamplingParams
from pdserve.model.batch import Batch
from tests.unit.decode_svc.decode_worker import ALWAYS, GREEDY, PROMPT, A, B, C, decode, job, oracle, sizes
from tests.unit.engine.fakes import BLOCK_SIZE, EOS, FakeDecoder, fake_logits, limits, write_prompt


def test_received_prompts_continue_after_the_first_tokens_without_reporting_them_again() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    events = worker.run()
    assert worker.tokens(A) == oracle(PROMPT)[1:]
    assert worker.reported[A][0][0].first_index == 1
    assert worker.reported[A][0][-1].finish_reason is FinishReason.LENGTH
    assert [event.finished for event in events][-1] == (AttemptId(A, 0),)
    assert worker.all_free


def test_started_is_reported_once_and_says_where_the_prompt_was_computed() -> None:
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


def test_a_request_that_runs_alone_shares_no_step_and_gets_the_same_tokens() -> None:
    worker = decode()
    several = replace(GREEDY, n=2)
    for request_id, alone in ((A, False), (B, True), (C, False)):
        worker.scheduler.reserve(replace(job(request_id, PROMPT, several, threshold=99), is_alone=alone))
    steps = [set(step) for step in sizes(worker) if step]
    assert {B} in steps
    assert {A, C} in steps
    assert all(step == {B} or B not in step for step in steps)
    assert all(worker.tokens(each, 1) == oracle(PROMPT, several, 1) for each in (A, B, C))
    assert worker.all_free


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


def test_choices_of_a_prompt_that_fills_its_blocks_need_no_copy() -> None:
    worker = decode()
    params = SamplingParams(n=3, seed=11, max_tokens=7, ignore_eos=True)
    worker.deliver(job(A, PROMPT[:8], params))
    worker.run()
    assert not any(plan.copies for plan in worker.plans)
    assert [worker.tokens(A, c) for c in range(3)] == [oracle(PROMPT[:8], params, c)[1:] for c in range(3)]


def test_a_choice_that_ends_with_its_first_token_does_not_run() -> None:
    worker = decode()
    params = SamplingParams(n=2, seed=1, max_tokens=4)
    worker.scheduler.reserve(job(A, PROMPT, params))
    grant = worker.grant(A)
    write_prompt(worker.cache, grant.block_tables[0], 0, PROMPT)
    worker.scheduler.activate(A, [EOS, 5])
    events = worker.run()
    assert set(worker.reported[A]) == {1}
    assert events[-1].finished == (AttemptId(A, 0),)


def test_a_request_whose_choices_all_end_with_their_first_tokens_is_over_at_once() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, SamplingParams(max_tokens=1)))
    worker.grant(A)
    worker.scheduler.activate(A, [3])
    assert worker.all_free
    assert [events.finished for events in worker.run()] == [(AttemptId(A, 0),)]


def test_generated_blocks_can_be_reused_by_the_next_turn() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.run()
    conversation = [*PROMPT, *oracle(PROMPT), 9]
    worker.scheduler.reserve(job(B, conversation))
    # 10 + 6 tokens; the KV of the last one was never computed.
    assert worker.grant(B).num_cached_blocks == 3


def bias_towards(token: int, **more: object) -> SamplingParams:
    return replace(GREEDY, max_tokens=9, logit_bias={token: 100.0}, **more)


def test_eos_ends_a_sequence_and_is_reported() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, bias_towards(EOS, ignore_eos=False), threshold=ALWAYS))
    worker.run()
    (message,) = worker.reported[A][0]
    assert (message.token_ids, message.finish_reason, message.stop_token_id) == ((EOS,), FinishReason.STOP, EOS)


def test_an_ignored_eos_is_an_ordinary_token() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, bias_towards(EOS), threshold=ALWAYS))
    worker.run()
    assert worker.tokens(A) == [EOS] * 9


def test_min_tokens_postpones_eos_and_stop_tokens() -> None:
    worker = decode()
    params = bias_towards(EOS, ignore_eos=False, min_tokens=4, stop_token_ids=(3,))
    worker.scheduler.reserve(job(A, PROMPT, params, threshold=ALWAYS))
    worker.run()
    tokens = worker.tokens(A)
    assert len(tokens) == 5
    assert tokens[-1] == EOS
    assert not {EOS, 3} & {*tokens[:-1]}


def test_a_stop_token_ends_a_sequence_even_if_eos_is_ignored() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, bias_towards(3, stop_token_ids=(3,)), threshold=ALWAYS))
    worker.run()
    assert worker.reported[A][0][-1].stop_token_id == 3


def test_a_sequence_ends_at_the_models_length() -> None:
    worker = decode(limits=limits(max_model_len=14))
    worker.scheduler.reserve(job(A, PROMPT, replace(GREEDY, max_tokens=99), threshold=ALWAYS))
    worker.run()
    assert worker.reported[A][0][-1].finish_reason is FinishReason.LENGTH
    assert len(worker.tokens(A)) == 4


def test_a_sequence_that_outgrows_the_whole_pool_ends_with_length() -> None:
    worker = decode(4)
    worker.scheduler.reserve(job(A, PROMPT, replace(GREEDY, max_tokens=50), threshold=ALWAYS))
    worker.run()
    assert worker.reported[A][0][-1].finish_reason is FinishReason.LENGTH
    assert len(worker.tokens(A)) == 4 * BLOCK_SIZE + 1 - len(PROMPT)
    assert worker.scheduler.load().num_preemptions == 0
    assert worker.all_free


class NanAfter(FakeDecoder):
    """Logits are NaN for sequences whose context starts with the token `poison`."""

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


def test_the_fake_model_distinguishes_contexts() -> None:
    assert not torch.equal(fake_logits([1, 2, 3]), fake_logits([1, 3, 2]))
