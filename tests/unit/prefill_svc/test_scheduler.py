from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.base.block_hash import hash_blocks
from pdserve.base.errors import InvalidTransition, NoFreeBlocks, RequestError
from pdserve.base.ids import RequestId, RouterId
from pdserve.base.sampling import FinishReason, SamplingParams
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.step import LayersWritten, StepEvents
from pdserve.model.batch import Batch
from prefill_svc.request import PrefillJob, PrefillSchedulerConfig
from prefill_svc.scheduler import PrefillScheduler
from tests.unit.engine.fakes import BLOCK_SIZE, EOS, KEY, VOCAB, FakeDecoder, Worker, expected, limits, read_prompt

A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
PROMPT = [1, 2, 3, 4, 5, 6, 8, 9, 10, 11]


@dataclass
class PrefillWorker(Worker):
    """A prefill worker whose scheduler is checked after every step."""

    scheduler: PrefillScheduler

    def step(self) -> StepEvents:
        events = super().step()
        self.scheduler.check_integrity()
        return events

    def sizes(self) -> list[dict[RequestId, int]]:
        """Tokens of each request in each step."""
        return [{chunk.sequence.request_id: chunk.stop - chunk.start for chunk in plan.chunks} for plan in self.plans]


def prefill(num_blocks: int = 32, *, budget: int = 100, decoder: FakeDecoder | None = None) -> PrefillWorker:
    pool = BlockPool(num_blocks, BLOCK_SIZE)
    scheduler = PrefillScheduler(pool, PrefillSchedulerConfig(limits=limits(), max_num_batched_tokens=budget))
    return PrefillWorker(pool=pool, scheduler=scheduler, decoder=decoder or FakeDecoder())


def job(request_id: RequestId, prompt: list[int], params: SamplingParams = GREEDY) -> PrefillJob:
    return PrefillJob(request_id=request_id, prompt_token_ids=prompt, params=params, hash_key=KEY)


def first_token(prompt: list[int], params: SamplingParams = GREEDY, choice: int = 0) -> int:
    return expected(prompt, params, choice, limits())[0]


@pytest.mark.parametrize("budget", [1, 3, 4, 9, 10, 100])
def test_the_first_token_and_the_kv_do_not_depend_on_the_size_of_the_chunks(budget: int) -> None:
    worker = prefill(budget=budget)
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    assert len(worker.plans) == -(-len(PROMPT) // budget)
    assert worker.tokens(A) == [first_token(PROMPT)]
    assert read_prompt(worker.cache, worker.scheduler.block_table(A), len(PROMPT)) == PROMPT


def test_progress_is_told_after_each_chunk() -> None:
    worker = prefill(budget=4)
    worker.scheduler.add(job(A, PROMPT))
    progress = [(p.num_computed, p.num_prompt, p.num_cached) for events in worker.run() for p in events.progress]
    assert progress == [(4, 10, 0), (8, 10, 0), (10, 10, 0)]


def test_each_chunk_asks_to_be_told_of_the_layers_its_job_names() -> None:
    worker = prefill(budget=6)
    worker.scheduler.add(replace(job(A, PROMPT), report_layers=(2, 5)))
    worker.scheduler.add(job(B, [21, 22, 23]))
    worker.run()
    table = worker.scheduler.block_table(A)
    assert len(table) == 3
    reports = [plan.reports for plan in worker.plans]
    assert reports == [
        tuple(LayersWritten(request_id=A, num_layers=layers, num_computed=stop, block_table=table) for layers in (2, 5))
        for stop in (6, 10)
    ] + [()] * (len(reports) - 2)
    assert {chunk.sequence.request_id for plan in worker.plans for chunk in plan.chunks} == {A, B}


def test_started_is_told_once_with_the_blocks_and_what_was_cached() -> None:
    worker = prefill(budget=4)
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    worker.scheduler.add(job(B, [*PROMPT[:8], 30]))
    started = [event for events in worker.run() for event in events.started]
    assert [(event.request_id, event.num_cached) for event in started] == [(B, 8)]
    assert started[0].block_table == worker.scheduler.block_table(B)
    assert started[0].block_table[:2] == worker.scheduler.block_table(A)[:2]
    assert (worker.scheduler.num_cached(B), worker.scheduler.num_computed(B)) == (8, 9)


def test_prompts_are_computed_first_come_first_served_and_share_a_step() -> None:
    worker = prefill(budget=8)
    for name, start in ((A, 0), (B, 1), (C, 2)):
        worker.scheduler.add(job(name, [start, *PROMPT[1:]]))
    worker.run()
    assert worker.sizes() == [{A: 8}, {A: 2, B: 6}, {B: 4, C: 4}, {C: 6}]


def test_a_prompt_found_in_the_cache_as_a_whole_recomputes_its_last_block() -> None:
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


def test_hashes_computed_before_are_used() -> None:
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


def test_forced_first_tokens_are_told_instead_of_sampled() -> None:
    worker = prefill()
    worker.scheduler.add(replace(job(A, PROMPT, replace(GREEDY, n=2)), forced_first_tokens=(3, EOS)))
    worker.run()
    assert [worker.tokens(A, 0), worker.tokens(A, 1)] == [[3], [EOS]]
    assert worker.reported[A][1][0].finish_reason is FinishReason.STOP
    assert worker.plans[0].chunks[0].samples == ()


def test_a_request_that_ends_with_its_first_token_says_so() -> None:
    worker = prefill()
    worker.scheduler.add(job(A, PROMPT, replace(GREEDY, max_tokens=1)))
    worker.scheduler.add(job(B, PROMPT, replace(GREEDY, logit_bias={EOS: 100.0})))
    worker.scheduler.add(job(C, PROMPT, replace(GREEDY, logit_bias={EOS: 100.0}, min_tokens=1)))
    worker.run()
    assert worker.reported[A][0][0].finish_reason is FinishReason.LENGTH
    assert (worker.reported[B][0][0].finish_reason, worker.reported[B][0][0].stop_token_id) == (FinishReason.STOP, EOS)
    assert worker.reported[C][0][0].finish_reason is None


def test_computed_blocks_are_held_until_released_and_stay_matchable_after() -> None:
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
def test_abort_frees_everything_in_every_phase(phase: str) -> None:
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


def test_asking_about_an_unknown_request_is_refused() -> None:
    with pytest.raises(InvalidTransition, match="not on this worker"):
        prefill().scheduler.block_table(A)


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
def test_what_would_break_a_step_is_refused_at_the_door(broken: PrefillJob) -> None:
    worker = prefill()
    with pytest.raises(RequestError):
        worker.scheduler.add(broken)
    assert not worker.scheduler.has_work()


def test_the_same_request_cannot_be_here_twice() -> None:
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


def test_new_full_blocks_are_told_to_the_prefix_index() -> None:
    worker = prefill(budget=4)
    worker.scheduler.add(job(A, PROMPT))
    hashes = hash_blocks(KEY, PROMPT, BLOCK_SIZE)
    assert [list(events.cache.added) for events in worker.run()] == [[hashes[0]], [hashes[1]], []]


def test_the_load_counts_prompts_and_their_tokens() -> None:
    worker = prefill(6, budget=4)
    worker.scheduler.add(job(A, PROMPT[:3]))
    worker.run()
    worker.scheduler.add(job(B, PROMPT))
    worker.scheduler.add(job(C, [2, *PROMPT]))
    worker.step()
    load = worker.scheduler.load()
    assert (load.num_held, load.num_running, load.num_waiting) == (1, 1, 1)
    assert load.queued_prompt_tokens == 6 + 11
    assert (load.free_blocks, load.total_blocks) == (2, 6)
    assert (load.prefix_query_tokens, load.prefix_hit_tokens) == (13, 0)


def test_the_load_tells_whose_prompts_are_queued() -> None:
    worker = prefill(9, budget=4)
    for request_id, router in ((A, "one"), (B, "two"), (C, "one")):
        worker.scheduler.add(replace(job(request_id, [11 + ord(request_id) % 3, *PROMPT]), router_id=RouterId(router)))
    worker.step()
    load = worker.scheduler.load()
    assert load.queued_by_router == {"one": 7 + 11, "two": 11}
    assert load.queued_prompt_tokens == 7 + 11 + 11
    worker.scheduler.release(B)
    assert worker.scheduler.load().queued_by_router == {"one": 7 + 11}
    worker.run()
    assert worker.scheduler.load().queued_by_router == {}


def test_of_a_prompt_that_waits_the_load_counts_what_was_not_cached_when_it_came() -> None:
    worker = prefill(6, budget=4)
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    worker.scheduler.release(A)
    for request_id, prompt in ((B, [20, 21]), (C, [*PROMPT, 30])):
        worker.scheduler.add(replace(job(request_id, prompt), router_id=RouterId(request_id)))
    assert worker.scheduler.load().queued_by_router == {B: 2, C: 3}
    assert (worker.scheduler.num_cached(C), worker.scheduler.num_computed(C)) == (8, 0)
    worker.run()
    assert (worker.scheduler.num_cached(C), worker.scheduler.load().queued_prompt_tokens) == (8, 0)


def test_what_was_evicted_while_a_prompt_waited_counts_again_when_it_begins() -> None:
    worker = prefill(6, budget=4)
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    worker.scheduler.release(A)
    worker.scheduler.add(job(B, [20 + token % 4 for token in range(24)]))
    worker.scheduler.add(job(C, [*PROMPT, 30]))
    assert worker.scheduler.load().queued_prompt_tokens == 24 + 3
    while not worker.scheduler.load().num_held:
        worker.step()
    worker.scheduler.release(B)
    worker.step()
    assert worker.scheduler.load().queued_prompt_tokens == 11 - 4


def test_masked_rows_never_read_what_an_earlier_owner_left() -> None:
    worker = prefill(3)
    worker.cache.tensor.fill_(float("inf"))
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    assert worker.tokens(A) == [first_token(PROMPT)]
    assert torch.isinf(worker.cache.tensor[worker.scheduler.block_table(A)[-1], 0, 0, 0, -1, 0])
