"""Requests that run ahead together get the tokens of lone runs, while others arrive, are aborted, end or fail.

Only the full depth has 150 examples instead of 75.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from decode_svc.request import DecodeJob
from decode_svc.scheduler import DecodeScheduler
from decode_svc.scheduler_config import DecodeSchedulerConfig
from kernels.decoder import LayerListener
from pdserve.base.ids import RequestId
from pdserve.base.sampling import FinishReason, SamplingParams
from pdserve.engine.sequence_limits import SequenceLimits
from pdserve.model.batch import Batch
from tests.support.depth import IS_FULL
from tests.unit.engine.fakes import BLOCK_SIZE, EOS, KEY, VOCAB, FakeDecoder, expected, limits
from tests.unit.engine.late import LateWorker, WatchedPool
from tests.unit.engine.letters import FOLLOWING, bounded, thinking

ALWAYS = 2**32 - 1
MAX_MODEL_LEN = 40


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request."""

    prompt: list[int]
    params: SamplingParams
    #: Number of runs of steps between the previous arrival and this one.
    after: int
    #: Number of runs after which it is aborted.
    leaves_after: int | None


arrivals = st.builds(
    Arrival,
    prompt=st.builds(
        lambda start, length: [(start + index) % VOCAB for index in range(length)],
        st.integers(8, 10),
        st.integers(3, 14),
    ),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 1.0]),
        seed=st.integers(0, 3),
        n=st.sampled_from([1, 1, 2, 3]),
        max_tokens=st.integers(1, 30),
        min_tokens=st.sampled_from([0, 0, 9]),
        ignore_eos=st.sampled_from([False, False, True]),
        stop_token_ids=st.sampled_from([(), (4, 13, 22)]),
        logprobs=st.sampled_from([None, 2]),
        logit_bias=st.sampled_from([{}, {}, {5: 3.0}]),
        repetition_penalty=st.sampled_from([*[1.0] * 9, 1.2]),
        allowed_token_ids=st.sampled_from([*[()] * 5, tuple(range(3, VOCAB))]),
        bad_words=st.sampled_from([*[()] * 5, ((12,), (17,)), ((13, 14), (9, 10, 11), (20, 21))]),
        grammar=st.sampled_from([*[""] * 5, FOLLOWING]),
        thinking=st.sampled_from([*[None] * 4, *(thinking(number, is_open=number > 2) for number in (0, 1, 3, 5, 9))]),
    ),
    after=st.integers(0, 3),
    leaves_after=st.sampled_from([None, None, None, 1, 3]),
)


class Fragile(FakeDecoder):
    """A decoder with NaN in the logits of some rows."""

    def forward(self, batch: Batch, kv_cache: Tensor, on_layer: LayerListener | None = None) -> Tensor:
        logits = super().forward(batch, kv_cache)
        broken = [token_id % 7 == 3 and position > 18 for token_id, position in _last_rows(batch)]
        logits[torch.tensor(broken, dtype=torch.bool)] = float("nan")
        return logits


def _last_rows(batch: Batch) -> list[tuple[int, int]]:
    rows = batch.logits_rows
    return list(zip(batch.token_ids[rows].tolist(), batch.positions[rows].tolist(), strict=True))


def _survives(prompt: list[int], tokens: list[int]) -> int:
    """Number of tokens that a choice gets with `Fragile`."""
    context = [*prompt, *tokens]
    for index in range(len(tokens)):
        position = len(prompt) + index - 1
        if context[position] % 7 == 3 and position > 18:
            return index
    return len(tokens)


@settings(max_examples=150 if IS_FULL else 75)
@given(
    arriving=st.lists(arrivals, min_size=2, max_size=7),
    num_blocks=st.sampled_from([9, 12, 60]),
    max_num_seqs=st.sampled_from([2, 8]),
    max_steps=st.lists(st.integers(2, 12), min_size=1, max_size=5),
    is_fragile=st.booleans(),
)
def test_requests_that_run_ahead_together_get_the_tokens_of_lone_runs(
    arriving: list[Arrival], num_blocks: int, max_num_seqs: int, max_steps: list[int], is_fragile: bool
) -> None:
    pool = WatchedPool(num_blocks, BLOCK_SIZE)
    scheduler = DecodeScheduler(
        pool, DecodeSchedulerConfig(limits=limits(MAX_MODEL_LEN), max_num_seqs=max_num_seqs, max_num_batched_tokens=9)
    )
    decoder = Fragile() if is_fragile else FakeDecoder()
    worker = LateWorker(pool=pool, scheduler=scheduler, decoder=decoder, check=scheduler.check_integrity)
    arrives, leaves = _timetable(arriving)
    run = 0
    while scheduler.has_work() or run <= max([*arrives, *leaves]):
        assert run < 1000, "the scheduler never runs out of work"
        for index in arrives.get(run, []):
            scheduler.reserve(_job(index, arriving[index]))
        for index in leaves.get(run, []):
            scheduler.abort(_id(index))
        if scheduler.has_work():
            worker.run_ahead(max_steps[run % len(max_steps)])
        run += 1
    failed = {failure.request_id for events in worker.seen for failure in events.failures}
    assert pool.num_free == num_blocks
    for index, arrival in enumerate(arriving):
        _check(worker, _id(index), arrival, has_failed=_id(index) in failed, is_fragile=is_fragile)


def _timetable(arriving: list[Arrival]) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Requests that arrive, and that are aborted, before each run of steps."""
    arrives: dict[int, list[int]] = {}
    leaves: dict[int, list[int]] = {}
    run = 0
    for index, arrival in enumerate(arriving):
        run += arrival.after
        arrives.setdefault(run, []).append(index)
        if arrival.leaves_after is not None:
            leaves.setdefault(run + arrival.leaves_after, []).append(index)
    return arrives, leaves


def _id(index: int) -> RequestId:
    return RequestId(f"r{index}")


def _job(index: int, arrival: Arrival) -> DecodeJob:
    return DecodeJob(
        request_id=_id(index),
        prompt_token_ids=arrival.prompt,
        params=arrival.params,
        grammar=bounded(arrival.params),
        hash_key=KEY,
        local_prefill_threshold=ALWAYS,
    )


def _check(worker: LateWorker, request_id: RequestId, arrival: Arrival, *, has_failed: bool, is_fragile: bool) -> None:
    """Asserts that a request's tokens are those of a lone run: a prefix if it was aborted or failed, else all."""
    bounds: SequenceLimits = limits(min(MAX_MODEL_LEN, worker.pool.num_blocks * BLOCK_SIZE + 1))
    lone = [expected(arrival.prompt, arrival.params, choice, bounds) for choice in range(arrival.params.n)]
    survive = [_survives(arrival.prompt, tokens) if is_fragile else len(tokens) for tokens in lone]
    must_fail = survive != [len(tokens) for tokens in lone]
    assert must_fail or not has_failed
    for choice, tokens in enumerate(lone):
        got = worker.tokens(request_id, choice)
        assert got == tokens[: min(len(got), survive[choice])]
        messages = worker.reported.get(request_id, {}).get(choice, [])
        assert all(message.finish_reason is None for message in messages[:-1])
        if arrival.leaves_after is None and not must_fail:
            assert got == tokens
            assert messages[-1].finish_reason is _reason(tokens, arrival.params)
    if arrival.leaves_after is None:
        assert has_failed == must_fail


def _reason(tokens: list[int], params: SamplingParams) -> FinishReason:
    ends = bool(params.grammar) or not params.ignore_eos  # A grammar decides itself where its output ends.
    is_stop = tokens[-1] in params.stop_token_ids or (tokens[-1] == EOS and ends)
    return FinishReason.STOP if is_stop else FinishReason.LENGTH
