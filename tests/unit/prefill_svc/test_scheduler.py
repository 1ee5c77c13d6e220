"""Prompts are computed in chunks, first come, first served, and their blocks are held until they are released."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.base.block_hash import hash_blocks
from pdserve.base.errors import InvalidTransition, NoFreeBlocks, RequestError
from pdserve.base.sampling import FinishReason, SamplingParams
from pdserve.engine.sequence import Fault, SampleFailure
from pdserve.engine.step import LayersWritten
from pdserve.model.batch import Batch
from prefill_svc.request import PrefillJob
from tests.unit.engine.fakes import BLOCK_SIZE, EOS, KEY, VOCAB, FakeDecoder, read_prompt
from tests.unit.prefill_svc.prefill_worker import GREEDY, PROMPT, A, B, C, first_token, job, prefill


@pytest.mark.parametrize("budget", [1, 3, 4, 9, 10, 100])
def test_the_first_token_and_the_kv_do_not_depend_on_the_chunk_size(budget: int) -> None:
    worker = prefill(budget=budget)
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    assert len(worker.plans) == -(-len(PROMPT) // budget)
    assert worker.tokens(A) == [first_token(PROMPT)]
    assert read_prompt(worker.cache, worker.scheduler.block_tables(A)[0], len(PROMPT)) == PROMPT


def test_progress_is_reported_after_each_chunk() -> None:
    worker = prefill(budget=4)
    worker.scheduler.add(job(A, PROMPT))
    progress = [(p.num_computed, p.num_prompt, p.num_cached) for events in worker.run() for p in events.progress]
    assert progress == [(4, 10, 0), (8, 10, 0), (10, 10, 0)]


def test_each_chunk_requests_reports_of_the_layers_that_its_job_names() -> None:
    worker = prefill(budget=6)
    worker.scheduler.add(replace(job(A, PROMPT), report_layers=(2, 5)))
    worker.scheduler.add(job(B, [21, 22, 23]))
    worker.run()
    table = worker.scheduler.block_tables(A)[0]
    assert len(table) == 3
    reports = [plan.reports for plan in worker.plans]
    assert reports == [
        tuple(
            LayersWritten(request_id=A, attempt=0, num_layers=layers, num_computed=stop, block_tables=(table,))
            for layers in (2, 5)
        )
        for stop in (6, 10)
    ] + [()] * (len(reports) - 2)
    assert {chunk.sequence.request_id for plan in worker.plans for chunk in plan.chunks} == {A, B}


def test_started_is_reported_once_with_the_blocks_and_the_cached_tokens() -> None:
    worker = prefill(budget=4)
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    worker.scheduler.add(job(B, [*PROMPT[:8], 30]))
    started = [event for events in worker.run() for event in events.started]
    assert [(event.request_id, event.num_cached) for event in started] == [(B, 8)]
    assert started[0].block_tables[0] == worker.scheduler.block_tables(B)[0]
    assert started[0].block_tables[0][:2] == worker.scheduler.block_tables(A)[0][:2]
    assert (worker.scheduler.num_cached(B), worker.scheduler.num_computed(B)) == (8, 9)


def test_prompts_are_computed_first_come_first_served_and_share_steps() -> None:
    worker = prefill(budget=8)
    for name, start in ((A, 0), (B, 1), (C, 2)):
        worker.scheduler.add(job(name, [start, *PROMPT[1:]]))
    worker.run()
    assert worker.sizes() == [{A: 8}, {A: 2, B: 6}, {B: 4, C: 4}, {C: 6}]


def test_a_prompt_is_computed_though_the_one_before_has_used_up_a_step_and_holds_its_blocks() -> None:
    worker = prefill(budget=len(PROMPT))
    for name, start in ((A, 0), (B, 1)):
        worker.scheduler.add(job(name, [start, *PROMPT[1:]]))
    worker.run()
    assert worker.sizes()[:2] == [{A: len(PROMPT)}, {B: len(PROMPT)}]


def test_a_prompt_that_has_lost_a_worker_keeps_its_turn() -> None:
    worker = prefill(budget=8)
    for name, arrived_at in ((A, 5.0), (B, 6.0), (C, 1.0)):
        worker.scheduler.add(replace(job(name, [ord(name) % 7, *PROMPT[1:]]), arrived_at=arrived_at))
    worker.run()
    assert worker.sizes() == [{C: 8}, {C: 2, A: 6}, {A: 4, B: 4}, {B: 6}]


def test_a_prompt_that_is_cached_entirely_recomputes_its_last_block() -> None:
    worker = prefill()
    worker.scheduler.add(job(A, PROMPT[:8]))
    worker.run()
    worker.scheduler.add(job(B, PROMPT[:8]))
    worker.run()
    assert worker.sizes() == [{A: 8}, {B: 4}]
    assert worker.tokens(B) == worker.tokens(A)
    assert worker.scheduler.num_cached(B) == 4


def test_blocks_of_earlier_chunks_can_be_reused_before_the_prompt_is_complete() -> None:
    worker = prefill(budget=8)
    worker.scheduler.add(job(A, [*PROMPT, *PROMPT]))
    worker.step()
    worker.scheduler.add(job(B, [*PROMPT[:8], 30]))
    worker.run()
    assert worker.scheduler.num_cached(B) == 8


def test_hashes_that_come_with_the_job_are_used() -> None:
    worker = prefill()
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    worker.scheduler.add(replace(job(B, PROMPT), hashes=hash_blocks(KEY, PROMPT, BLOCK_SIZE)))
    worker.run()
    assert worker.scheduler.num_cached(B) == 8


def test_all_choices_are_sampled_from_one_row_of_logits() -> None:
    params = SamplingParams(n=4, seed=9, max_tokens=5, logprobs=1)
    worker = prefill()
    worker.scheduler.add(job(A, PROMPT, params))
    worker.run()
    assert [worker.tokens(A, c) for c in range(4)] == [[first_token(PROMPT, params, c)] for c in range(4)]
    assert all(len(worker.reported[A][c][0].logprobs) == 1 for c in range(4))


def test_forced_first_tokens_are_reported_instead_of_sampled_ones() -> None:
    worker = prefill()
    worker.scheduler.add(replace(job(A, PROMPT, replace(GREEDY, n=2)), forced_first_tokens=(3, EOS)))
    worker.run()
    assert [worker.tokens(A, 0), worker.tokens(A, 1)] == [[3], [EOS]]
    assert worker.reported[A][1][0].finish_reason is FinishReason.STOP
    assert worker.plans[0].chunks[0].samples == ()


def test_a_first_token_that_ends_its_choice_has_a_finish_reason() -> None:
    worker = prefill()
    worker.scheduler.add(job(A, PROMPT, replace(GREEDY, max_tokens=1)))
    worker.scheduler.add(job(B, PROMPT, replace(GREEDY, logit_bias={EOS: 100.0})))
    worker.scheduler.add(job(C, PROMPT, replace(GREEDY, logit_bias={EOS: 100.0}, min_tokens=1)))
    worker.run()
    assert worker.reported[A][0][0].finish_reason is FinishReason.LENGTH
    assert (worker.reported[B][0][0].finish_reason, worker.reported[B][0][0].stop_token_id) == (FinishReason.STOP, EOS)
    assert worker.reported[C][0][0].finish_reason is None


def test_a_prompt_that_runs_alone_shares_no_step() -> None:
    worker = prefill(budget=30)
    for request_id, alone in ((A, False), (B, True), (C, False)):
        worker.scheduler.add(replace(job(request_id, [*PROMPT, ord(request_id) % 7]), is_alone=alone))
    worker.run()
    assert [set(sizes) for sizes in worker.sizes() if sizes] == [{A}, {B}, {C}]
    assert all(len(worker.tokens(request_id)) == 1 for request_id in (A, B, C))


def test_a_prompt_that_fails_before_its_step_leaves_the_others() -> None:
    worker = prefill()
    worker.scheduler.add(job(A, PROMPT))
    worker.scheduler.add(job(B, PROMPT))
    plan = worker.scheduler.schedule(worker.pace)
    worker.scheduler.fail(A, SampleFailure(reason="it is broken", fault=Fault.PREPARATION))
    rest = plan.without({A})
    logits = worker.runner.forward(rest, worker.runner.build(rest))
    events = worker.scheduler.update(rest, worker.runner.sample(rest, logits))
    worker.note(events)
    assert [(each.request_id, each.fault) for each in events.failures] == [(A, Fault.PREPARATION)]
    assert worker.tokens(B) == [first_token(PROMPT)]
    worker.scheduler.release(B)
    worker.scheduler.check_integrity()
    assert worker.pool.num_free == worker.pool.num_blocks


def test_computed_blocks_are_held_until_released_and_can_be_matched_afterwards() -> None:
    worker = prefill(3)
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    assert worker.pool.num_free == 0
    worker.scheduler.add(job(B, PROMPT[:9]))
    worker.run(max_steps=1)
    assert B not in worker.reported
    worker.scheduler.release(A)
    worker.scheduler.check_integrity()
    worker.run()
    assert worker.tokens(B) == [first_token(PROMPT[:9])]
    assert worker.scheduler.num_cached(B) == 8


def test_waiting_for_blocks_is_not_work() -> None:
    worker = prefill(3)
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    worker.scheduler.add(job(B, [2, *PROMPT[1:]]))
    worker.run(max_steps=1)
    assert not worker.scheduler.has_work()
    assert worker.scheduler.load().num_waiting == 1


def test_a_prompt_that_does_not_fit_holds_up_those_behind_it() -> None:
    worker = prefill(4)
    worker.scheduler.add(job(A, PROMPT))
    worker.scheduler.add(job(B, [2, *PROMPT[1:]]))
    worker.scheduler.add(job(C, [3]))
    worker.run()
    assert set(worker.reported) == {A}
    worker.scheduler.release(A)
    worker.run()
    assert set(worker.reported) == {A, B, C}


@pytest.mark.parametrize("phase", ["waiting", "computing", "computed"])
def test_release_frees_everything_in_every_phase(phase: str) -> None:
    worker = prefill(budget=4)
    worker.scheduler.add(job(A, PROMPT))
    if phase == "computing":
        worker.step()
    elif phase == "computed":
        worker.run()
    assert worker.scheduler.release(A)
    worker.scheduler.check_integrity()
    assert worker.pool.num_free == worker.pool.num_blocks
    assert not worker.scheduler.release(A)
    assert not worker.scheduler.has_work()


def test_a_query_about_an_unknown_request_is_refused() -> None:
    with pytest.raises(InvalidTransition, match="not on this worker"):
        prefill().scheduler.block_tables(A)[0]


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(NoFreeBlocks, match="needs 3 KV blocks for 10 prompt tokens, but this worker has 2 in all"):
        prefill(2).scheduler.add(job(A, PROMPT))


@pytest.mark.parametrize(
    "broken",
    [
        job(A, []),
        job(A, [VOCAB]),
        job(A, [1] * 64),
        replace(job(A, PROMPT), forced_first_tokens=(1, 2)),
        replace(job(A, PROMPT), forced_first_tokens=(VOCAB,)),
    ],
)
def test_a_prompt_that_would_break_a_step_is_refused_on_arrival(broken: PrefillJob) -> None:
    worker = prefill()
    with pytest.raises(RequestError):
        worker.scheduler.add(broken)
    assert not worker.scheduler.has_work()


def test_a_request_id_that_is_here_already_is_refused() -> None:
    worker = prefill()
    worker.scheduler.add(job(A, PROMPT))
    with pytest.raises(InvalidTransition, match="already being computed"):
        worker.scheduler.add(job(A, PROMPT))


class NanFor(FakeDecoder):
    """NaN logits for prompts of one length."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        logits = super().forward(batch, kv_cache)
        logits[batch.context_lens == self._num_tokens] = float("nan")
        return logits


def test_nan_logits_fail_their_request_and_no_other() -> None:
    worker = prefill(decoder=NanFor(9))
    worker.scheduler.add(job(A, PROMPT))
    worker.scheduler.add(job(B, PROMPT[:9], replace(GREEDY, n=2)))
    (events,) = worker.run()
    assert [(f.request_id, str(f.error)) for f in events.failures] == [
        (B, "Request b cannot go on: the logits of token 0 have no finite maximum.")
    ]
    assert worker.tokens(A) == [first_token(PROMPT)]
    worker.scheduler.release(A)
    assert worker.pool.num_free == worker.pool.num_blocks


def test_new_full_blocks_enter_the_prefix_index() -> None:
    worker = prefill(budget=4)
    worker.scheduler.add(job(A, PROMPT))
    hashes = hash_blocks(KEY, PROMPT, BLOCK_SIZE)
    assert [list(events.cache.added) for events in worker.run()] == [[hashes[0]], [hashes[1]], []]


def test_masked_rows_never_read_what_an_earlier_owner_left_behind() -> None:
    worker = prefill(3)
    worker.cache.tensor.fill_(float("inf"))
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    assert worker.tokens(A) == [first_token(PROMPT)]
    assert torch.isinf(worker.cache.tensor[worker.scheduler.block_tables(A)[0][-1], 0, 0, 0, -1, 0])


def test_each_event_carries_its_attempt() -> None:
    worker = prefill(4)
    worker.scheduler.add(replace(job(A, PROMPT), attempt=3))
    worker.scheduler.add(replace(job(B, PROMPT), attempt=4))
    [events] = worker.run()
    found = [*events.started, *events.progress, *events.tokens]
    assert [(each.request_id, each.attempt) for each in found] == [(A, 3)] * 3
    assert worker.scheduler.hand_back() == [(B, 4)]
