"""Requests wait for blocks in order; blocks that wait for transfers stay within their share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pdserve.base.block_hash import hash_blocks
from pdserve.base.errors import InvalidTransition, NoFreeBlocks, RequestError
from pdserve.base.ids import RequestId
from pdserve.base.sampling import SamplingParams
from pdserve.engine.sequence_limits import SequenceLimits
from tests.unit.decode_svc.decode_worker import GREEDY, PROMPT, A, B, C, decode, job, oracle
from tests.unit.engine.fakes import BLOCK_SIZE, KEY, VOCAB


def test_a_grant_names_all_blocks_of_the_prompt_and_how_many_are_cached() -> None:
    worker = decode()
    first = worker.deliver(job(A, PROMPT))
    worker.run()
    worker.scheduler.reserve(job(B, [*PROMPT[:8], 20, 21, 22]))
    second = worker.grant(B)
    assert (len(first.block_tables[0]), first.num_cached_blocks) == (3, 0)
    assert (len(second.block_tables[0]), second.num_cached_blocks) == (3, 2)
    assert second.block_tables[0][:2] == first.block_tables[0][:2]


def test_a_prompt_that_fills_its_blocks_can_be_cached_entirely() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT[:8]))
    worker.run()
    grant = worker.deliver(job(B, PROMPT[:8]))
    worker.run()
    assert grant.num_cached_blocks == len(grant.block_tables[0]) == 2
    assert worker.tokens(B) == oracle(PROMPT[:8])[1:]


def test_blocks_that_are_being_received_are_not_shared() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT))
    worker.scheduler.reserve(job(B, PROMPT))
    events = worker.step()
    assert [grant.num_cached_blocks for grant in events.grants] == [0, 0]
    assert not set(events.grants[0].block_tables[0]) & set(events.grants[1].block_tables[0])


def test_hashes_that_come_with_the_job_are_used() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.run()
    worker.scheduler.reserve(replace(job(B, PROMPT), hashes=hash_blocks(KEY, PROMPT, BLOCK_SIZE)[:1]))
    assert worker.grant(B).num_cached_blocks == 2


def test_blocks_hashed_with_another_key_are_not_found() -> None:
    worker = decode()
    worker.deliver(job(A, PROMPT))
    worker.run()
    worker.scheduler.reserve(replace(job(B, PROMPT), hash_key=bytes([1] * 32)))
    assert worker.grant(B).num_cached_blocks == 0


def test_grants_come_in_order_and_a_large_request_is_not_overtaken() -> None:
    worker = decode(8, max_reserved_share=1.0)
    worker.scheduler.reserve(job(A, PROMPT))  # 3 blocks
    worker.scheduler.reserve(job(B, [*PROMPT, *PROMPT]))  # 6
    worker.scheduler.reserve(job(C, [1]))  # 1, would fit along with A
    assert [grant.request_id for events in worker.run() for grant in events.grants] == [A]
    worker.scheduler.abort(A)
    assert [grant.request_id for events in worker.run() for grant in events.grants] == [B, C]


def test_a_request_that_has_lost_a_worker_keeps_its_turn() -> None:
    worker = decode(6, max_reserved_share=1.0)
    for name, arrived_at in ((A, 5.0), (B, 6.0), (C, 1.0)):
        worker.scheduler.reserve(replace(job(name, PROMPT), arrived_at=arrived_at))  # 3 blocks each
    assert [grant.request_id for events in worker.run() for grant in events.grants] == [C, A]
    worker.scheduler.abort(A)
    assert [grant.request_id for events in worker.run() for grant in events.grants] == [B]


def test_reservations_stay_within_their_share_of_the_blocks() -> None:
    worker = decode(16, max_reserved_share=0.5)
    for index in range(4):
        worker.scheduler.reserve(job(RequestId(f"r{index}"), [index, *PROMPT]))  # 3 blocks each, 8 allowed
    assert [grant.request_id for events in worker.run() for grant in events.grants] == ["r0", "r1"]
    worker.scheduler.abort(RequestId("r0"))
    assert [grant.request_id for events in worker.run() for grant in events.grants] == ["r2"]
    worker.scheduler.prefill_locally(RequestId("r1"))
    assert [grant.request_id for events in worker.run() for grant in events.grants] == ["r3"]


def test_a_request_may_exceed_the_share_on_an_otherwise_empty_worker() -> None:
    worker = decode(8, max_reserved_share=0.25)
    worker.scheduler.reserve(job(A, [*PROMPT, *PROMPT]))
    assert len(worker.grant(A).block_tables[0]) == 5


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
def test_a_request_that_would_break_a_step_is_refused_on_arrival(prompt: list[int], params: SamplingParams) -> None:
    worker = decode()
    with pytest.raises(RequestError):
        worker.scheduler.reserve(job(A, prompt, params))
    assert not worker.scheduler.has_work()


def test_a_request_id_that_is_here_already_is_refused() -> None:
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


def test_the_models_limits_apply_even_if_the_pool_is_larger() -> None:
    bounds = SequenceLimits(max_model_len=8, vocab_size=VOCAB)
    worker = decode(64, limits=bounds)
    with pytest.raises(RequestError, match=r"has 8 tokens \(limit 7"):
        worker.scheduler.reserve(job(A, PROMPT[:8]))
