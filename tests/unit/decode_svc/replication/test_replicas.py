"""Copies of a request's blocks at another decode worker, which goes on with the request when the first one is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_svc.replication.source import ReplicaTarget, ReplicationPolicy
from decode_svc.request import DecodeJob
from pdserve.base.errors import NoFreeBlocks, StaleError
from pdserve.base.ids import AttemptId, BlockHash, Epoch, RequestId, WorkerId
from pdserve.base.sampling import SamplingParams
from tests.support.depth import IS_FULL
from tests.unit.decode_svc.decode_worker import (
    ALWAYS,
    GREEDY,
    PROMPT,
    A,
    B,
    DecodeWorker,
    decode,
    job,
    oracle,
    running,
)
from tests.unit.engine.fakes import BLOCK_SIZE

CHOICES = 3
SAMPLED = SamplingParams(n=CHOICES, seed=7, temperature=0.9, max_tokens=16, ignore_eos=True, repetition_penalty=1.2)
LONG = replace(GREEDY, max_tokens=20)
A1, B1 = AttemptId(A, 0), AttemptId(B, 0)
COPY = RequestId("copy")
#: Blocks of a worker that takes all copies of a request at once.
LARGE = 320


def copy(source: DecodeWorker, target: DecodeWorker) -> int:
    """What a transfer does: the blocks that are missing at the target come from the source. Returns their number."""
    batch = source.scheduler.replicas.take(source.scheduler.replicas.running())
    source.scheduler.check_integrity()
    room = target.scheduler.replicas.reserve(COPY, batch.hashes)
    target.scheduler.check_integrity()
    if room.blocks:
        target.cache.tensor[room.blocks] = source.cache.tensor[[batch.blocks[index] for index in room.missing]]
        target.scheduler.replicas.arrived(COPY)
    source.scheduler.replicas.let_go(batch, () if room.is_partial else (A1,))
    return len(room.blocks)


def continued(prompt: list[int], params: SamplingParams, lengths: dict[int, int]) -> DecodeJob:
    """The request as the other worker gets it when the first one is lost."""
    output = {choice: tuple(oracle(prompt, params, choice)[:length]) for choice, length in lengths.items()}
    over = frozenset(range(params.n)) - lengths.keys()
    return replace(job(A, prompt, params, threshold=ALWAYS), output=output, over=over)


@settings(max_examples=100 if IS_FULL else 30)
@given(
    first=st.integers(1, 6),
    more=st.integers(1, 6),
    behind=st.integers(0, 3),
    prompt_length=st.integers(1, 10),
    over=st.sets(st.integers(0, CHOICES - 1), max_size=CHOICES - 1),
    is_evicted=st.booleans(),
)
def test_the_rest_of_each_choice_is_that_of_an_undisturbed_run(
    first: int, more: int, behind: int, prompt_length: int, over: set[int], is_evicted: bool
) -> None:
    """Fails when a copy is taken for other tokens, when it is written to, or when a block of it is lost."""
    prompt = PROMPT[:prompt_length]
    source, target = running(prompt, SAMPLED, first), decode(LARGE)
    copy(source, target)
    while len(source.tokens(A)) < first + more:
        source.step()
    copy(source, target)
    if is_evicted:  # All but the latest copies have given way to other requests.
        target.pool.release(target.pool.allocate(target.pool.num_free - 3) or ())
    lengths = {choice: first + more - min(behind, first) for choice in range(CHOICES) if choice not in over}
    going_on = continued(prompt, SAMPLED, {choice: max(1, length) for choice, length in lengths.items()})
    target.scheduler.reserve(going_on)
    target.run()
    for choice in range(CHOICES):
        known = len(going_on.output.get(choice, ()))
        assert target.tokens(A, choice) == ([] if choice in over else oracle(prompt, SAMPLED, choice)[known:])
    source.run()
    assert [source.tokens(A, choice) for choice in range(CHOICES)] == [
        oracle(prompt, SAMPLED, c) for c in range(CHOICES)
    ]
    assert source.all_free
    assert target.all_free


def test_only_what_is_behind_the_last_copy_is_computed() -> None:
    source, target = running(PROMPT, LONG, 17), decode(LARGE)
    assert copy(source, target) == (len(PROMPT) + 16) // BLOCK_SIZE
    target.scheduler.reserve(continued(PROMPT, LONG, {0: 17}))
    target.run()
    computed = sum(chunk.stop - chunk.start for plan in target.plans for chunk in plan.chunks)
    assert computed == (len(PROMPT) + 17) - (len(PROMPT) + 16) // BLOCK_SIZE * BLOCK_SIZE
    assert target.scheduler.replicas.num_used == (len(PROMPT) + 16) // BLOCK_SIZE - len(PROMPT) // BLOCK_SIZE


def test_blocks_are_offered_once_and_again_to_another_worker() -> None:
    source, target = running(PROMPT, LONG, 9), decode(LARGE)
    num_blocks = copy(source, target)
    assert copy(source, target) == 0
    assert not source.scheduler.replicas.take([A1]).blocks
    source.scheduler.replicas.forget(A1)
    other = source.scheduler.replicas.take([A1])
    assert len(other.blocks) == num_blocks
    assert not target.scheduler.replicas.reserve(COPY, other.hashes).blocks


def test_each_request_has_copies_of_its_own_blocks_only_where_they_go() -> None:
    """Fails when a request that another worker was named for meanwhile counts as copied."""
    one, other = ReplicaTarget(WorkerId("one"), Epoch(1), "h:1"), ReplicaTarget(WorkerId("other"), Epoch(2), "h:2")
    policy = ReplicationPolicy(1.0)
    assert policy.update([A1, B1], 0.0) == {}
    assert policy.update([A1, B1], 1.0) == {A1: 0, B1: 0}
    assert policy.update([A1, B1], 2.0) == {}
    policy.name(A1, one)
    policy.name(B1, one)
    assert policy.by_target() == {one: [A1, B1]}
    policy.name(B1, other)
    assert policy.at(one) == {A1}
    assert policy.lose(one) == [A1]
    assert policy.update([A1, B1], 7.0) == {A1: 1}
    assert policy.update([A1], 13.0) == {A1: 1}
    assert policy.by_target() == {}


def test_blocks_that_did_not_arrive_are_offered_again() -> None:
    source = running(PROMPT, LONG, 9)
    replicas = source.scheduler.replicas
    batch = replicas.take([A1])
    replicas.let_go(batch, ())
    assert replicas.take([A1]).hashes == batch.hashes


def test_a_request_that_ends_while_its_blocks_leave_holds_them_until_then() -> None:
    source = running(PROMPT, LONG, 9)
    batch = source.scheduler.replicas.take([A1])
    source.scheduler.abort(A)
    source.scheduler.check_integrity()
    assert not source.all_free
    source.scheduler.replicas.let_go(batch, (A1,))
    assert source.all_free
    assert not source.scheduler.replicas.take([A1]).blocks


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_a_request_gets_the_blocks_of_one_that_ended_while_they_left(how: str) -> None:
    """Fails when it waits until something else happens."""
    worker = decode(10)
    worker.scheduler.reserve(job(A, PROMPT, LONG, threshold=ALWAYS))
    while len(worker.tokens(A)) < 9:
        worker.step()
    replicas, moves = worker.scheduler.replicas, worker.scheduler.migrating
    batch = replicas.take([A1]) if how == "copied" else None
    if batch is None:
        moves.hold(A, {0: 9}, 0)
    worker.scheduler.abort(A)
    worker.scheduler.reserve(job(B, [3] * 34, replace(GREEDY, max_tokens=2), threshold=ALWAYS))
    worker.run()
    assert not worker.tokens(B)
    if batch is None:
        moves.let_go(A)
    else:
        replicas.let_go(batch, (A1,))
    worker.run()
    assert len(worker.tokens(B)) == 2


def test_copies_take_only_blocks_to_spare() -> None:
    hashes = [BlockHash(bytes([index] * 16)) for index in range(4)]
    target = decode(32)  # At most a sixteenth.
    room = target.scheduler.replicas.reserve(COPY, hashes)
    assert (room.missing, room.is_partial) == ([0, 1], True)
    with pytest.raises(NoFreeBlocks):
        target.scheduler.replicas.reserve(RequestId("another"), hashes[2:3])
    with pytest.raises(StaleError):
        target.scheduler.replicas.reserve(COPY, hashes[2:3])
    target.scheduler.replicas.arrived(COPY)
    room = target.scheduler.replicas.reserve(COPY, hashes)
    assert (room.missing, room.is_partial) == ([2, 3], False)
    target.scheduler.check_integrity()
    target.scheduler.replicas.drop(COPY)
    assert target.all_free
    # One that needs nearly all of its blocks itself spares none.
    held = target.pool.allocate(30)
    assert held is not None
    with pytest.raises(NoFreeBlocks):
        target.scheduler.replicas.reserve(COPY, hashes)


def test_isolated_requests_and_requests_that_do_not_run_have_no_copies() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT, LONG))
    worker.step()
    assert worker.scheduler.replicas.running() == []
    assert not worker.scheduler.replicas.take([A1, B1]).blocks
    worker = running(PROMPT, LONG, 5)
    assert worker.scheduler.replicas.running() == [A1]
    worker.scheduler.migrating.isolate(A, bytes(32))
    assert worker.scheduler.replicas.running() == []


def test_a_batch_has_a_limit_and_the_next_one_goes_on_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decode_svc.replication.replicas.MAX_BLOCKS", 3)
    source, target = running(PROMPT, LONG, 9), decode(LARGE)
    counts = [copy(source, target) for _ in range(3)]
    assert counts == [3, (len(PROMPT) + 8) // BLOCK_SIZE - 3, 0]
