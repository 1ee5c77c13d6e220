"""Prompts that are scored: each token has the log-probability that it would have as an output."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.decoder import LayerListener
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams, TokenLogprobs
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.sampler import Sampler
from pdserve.engine.sequence import Sampled, SampleRow
from pdserve.engine.token_rules import only
from pdserve.model.batch import Batch
from prefill_svc.request import PrefillJob, PrefillPhase, PrefillSchedulerConfig
from prefill_svc.scheduler import PrefillScheduler
from tests.unit.engine.fakes import BLOCK_SIZE, VOCAB, FakeDecoder, fake_logits, limits
from tests.unit.engine.fakes import row as sample_row
from tests.unit.prefill_svc.prefill_worker import PROMPT, A, B, C, PrefillWorker, first_token, job, prefill

SCORES = SamplingParams(temperature=0.0, max_tokens=1, logprobs=3, logprob_token_ids=(5, 30))


def scored(request_id: RequestId, prompt: list[int], params: SamplingParams = SCORES) -> PrefillJob:
    return replace(job(request_id, prompt, params), is_scored=True)


def scoring(budget: int, max_scored: int) -> PrefillWorker:
    pool = BlockPool(32, BLOCK_SIZE)
    config = PrefillSchedulerConfig(limits=limits(), max_num_batched_tokens=budget, max_scored_tokens=max_scored)
    return PrefillWorker(pool=pool, scheduler=PrefillScheduler(pool, config))


def as_output(context: list[int], token: int, params: SamplingParams = SCORES) -> TokenLogprobs:
    """What the sampler reports of an output `token` behind `context`, to which a bias alone has led."""
    row = sample_row(replace(params, logit_bias={token: 100.0}))
    [result] = Sampler().sample(fake_logits(context).unsqueeze(0), [row], [0])
    assert isinstance(result, Sampled)
    assert result.token_id == token
    assert result.logprobs is not None
    return result.logprobs


def scores_of(worker: PrefillWorker, request_id: RequestId) -> list[TokenLogprobs]:
    """All that was reported of a prompt. Asserts that its numbers have no gaps."""
    found: list[TokenLogprobs] = []
    for event in (each for events in worker.seen for each in events.scores if each.request_id == request_id):
        assert event.first == len(found) + 1
        found += event.logprobs
    return found


@pytest.mark.parametrize(("budget", "max_scored"), [(1, 1), (3, 128), (100, 3), (4, 2), (100, 128)])
def test_scores_are_those_of_outputs_and_do_not_depend_on_chunks_or_on_others(budget: int, max_scored: int) -> None:
    worker = scoring(budget, max_scored)
    other = [9, *PROMPT[1:], 12, 13]
    for request in (job(C, [3, 4, 5]), scored(A, PROMPT), job(B, other)):
        worker.scheduler.add(request)
    worker.run()
    assert scores_of(worker, A) == [as_output(PROMPT[:index], PROMPT[index]) for index in range(1, len(PROMPT))]
    assert A not in worker.reported
    assert worker.tokens(B) == [first_token(other)]
    for plan in worker.plans:
        assert sum(len(chunk.scores) for chunk in plan.chunks) <= max_scored
        assert plan.num_prefill_tokens <= budget


def test_other_prompts_use_what_scored_ones_leave_of_a_step() -> None:
    worker = scoring(20, 4)
    for request in (scored(A, PROMPT), scored(B, [2, *PROMPT]), job(C, [3, *PROMPT])):
        worker.scheduler.add(request)
    worker.run()
    assert worker.sizes()[:3] == [{A: 4, C: 11}, {A: 4}, {A: 2, B: 3}]
    assert len(scores_of(worker, B)) == len(PROMPT)
    worker.scheduler.release(A)
    assert worker.scheduler.load().num_held == 2


def test_cached_blocks_are_computed_again_and_those_of_a_scored_prompt_are_found() -> None:
    worker = prefill()
    worker.scheduler.add(job(A, PROMPT))
    worker.run()
    worker.scheduler.add(scored(B, PROMPT))
    assert worker.scheduler.num_cached(B) == 0
    hits = worker.scheduler.load().prefix_hit_tokens, worker.scheduler.load().prefix_query_tokens
    worker.run()
    assert len(scores_of(worker, B)) == len(PROMPT) - 1
    assert worker.scheduler.num_cached(B) == 0
    assert (worker.scheduler.load().prefix_hit_tokens, worker.scheduler.load().prefix_query_tokens) == hits
    for request_id in (A, B):
        worker.scheduler.release(request_id)
    alone = prefill()
    alone.scheduler.add(scored(A, PROMPT))
    alone.run()
    alone.scheduler.release(A)
    alone.scheduler.add(job(C, PROMPT))
    alone.run()
    assert alone.scheduler.num_cached(C) == 8
    assert alone.tokens(C) == [first_token(PROMPT)]


@pytest.mark.parametrize("budget", [1, 100])
def test_a_prompt_of_one_token_has_no_scores(budget: int) -> None:
    worker = prefill(budget=budget)
    worker.scheduler.add(scored(A, PROMPT[:1]))
    worker.run()
    assert scores_of(worker, A) == []
    assert [each.num_computed for events in worker.seen for each in events.progress] == [1]


class BrokenDecoder(FakeDecoder):
    """The logits of the prompts of one length are no numbers, in the row of their token 5."""

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        logits = super().forward(batch, kv_cache, on_layer)
        for index, row in enumerate(batch.logits_rows.tolist()):
            if batch.token_ids[row] == PROMPT[5]:
                logits[index] = torch.nan
        return logits


def test_a_prompt_whose_logits_are_no_numbers_fails_alone() -> None:
    worker = prefill(decoder=BrokenDecoder())
    worker.scheduler.add(scored(A, PROMPT))
    worker.scheduler.add(scored(B, [20, 21, 22]))
    worker.run()
    failures = [each.request_id for events in worker.seen for each in events.failures]
    assert failures == [A]
    assert not scores_of(worker, A)
    assert len(scores_of(worker, B)) == 2
    worker.scheduler.release(B)
    assert worker.pool.num_free == worker.pool.num_blocks


def test_a_scored_prompt_holds_its_blocks_until_it_is_released() -> None:
    worker = prefill()
    worker.scheduler.add(scored(A, PROMPT))
    worker.run()
    held = worker.scheduler.load().num_held
    assert (held, PrefillPhase.COMPUTED.value) == (1, "computed")
    assert worker.pool.num_free == worker.pool.num_blocks - 3


@pytest.mark.parametrize("token", [0, 1, VOCAB - 1, 31, 32, 63])
def test_the_bits_of_a_single_token_allow_it_alone(token: int) -> None:
    logits = torch.zeros(1, 64)
    row = SampleRow(
        params=SCORES, choice_index=0, tokens=sample_row(SCORES).tokens, num_prompt=3, listed=only(token, 64)
    )
    [result] = Sampler().sample(logits, [row], [0])
    assert isinstance(result, Sampled)
    assert result.token_id == token
