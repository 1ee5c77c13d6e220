"""A request that moves to another decode worker while it runs: full blocks are copied, tokens caught up with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_svc.request import DecodeJob
from pdserve.base.errors import Diverged, InvalidTransition, RequestError, StaleError
from pdserve.base.sampling import ChoiceTokens, SamplingParams
from tests.support.depth import IS_FULL
from tests.unit.decode_svc.decode_worker import (
    ALWAYS,
    GREEDY,
    PROMPT,
    A,
    B,
    DecodeWorker,
    decode,
    first_tokens,
    job,
    oracle,
    running,
)
from tests.unit.engine.fakes import BLOCK_SIZE, write_prompt

CHOICES = 3
SAMPLED = SamplingParams(n=CHOICES, seed=7, temperature=0.9, max_tokens=16, ignore_eos=True, repetition_penalty=1.2)
LONG = replace(GREEDY, max_tokens=20)


def moving(prompt: list[int], params: SamplingParams, lengths: dict[int, int]) -> DecodeJob:
    """The request as the other worker gets it: the client has so many tokens of these choices; others are over."""
    return replace(
        job(A, prompt, params),
        output={choice: tuple(oracle(prompt, params, choice)[:length]) for choice, length in lengths.items()},
        over=frozenset(range(params.n)) - lengths.keys(),
        is_moving=True,
    )


def copy(source: DecodeWorker, target: DecodeWorker, job: DecodeJob) -> int:
    """What a transfer does: the blocks that the target waits for come from the source. Returns their number."""
    grant = target.grant(job.request_id)
    lengths = {choice: len(tokens) for choice, tokens in job.output.items()}
    held = source.scheduler.migrating.hold(job.request_id, lengths, grant.num_cached_blocks)
    awaited = grant.block_tables[0][grant.num_cached_blocks :]
    target.cache.tensor[list(awaited)] = source.cache.tensor[held[: len(awaited)]]
    source.scheduler.migrating.let_go(job.request_id)
    return len(awaited)


def known(choice: int, first: int, tokens: list[int]) -> ChoiceTokens:
    return ChoiceTokens(choice_index=choice, first_index=first, token_ids=tuple(tokens))


@settings(max_examples=100 if IS_FULL else 30)
@given(
    sampled=st.integers(2, SAMPLED.max_tokens - 2),
    lag=st.integers(0, 3),
    prompt_length=st.integers(1, 10),
    over=st.sets(st.integers(0, CHOICES - 1), max_size=CHOICES - 1),
    is_tight=st.booleans(),
    is_known=st.booleans(),
)
def test_the_rest_of_each_choice_is_that_of_an_undisturbed_run(
    sampled: int, lag: int, prompt_length: int, over: set[int], is_tight: bool, is_known: bool
) -> None:
    """Fails when blocks go to other positions, or when a token is computed for another one."""
    prompt = PROMPT[:prompt_length]
    source, target = running(prompt, SAMPLED, sampled), decode(16 if is_tight else 40)
    if is_known:  # The prompt is in the target's cache.
        target.scheduler.reserve(job(B, [*PROMPT[:prompt_length], 3], replace(GREEDY, max_tokens=1), threshold=ALWAYS))
        target.run()
    length = max(1, sampled - lag)
    arriving = moving(prompt, SAMPLED, {choice: length for choice in range(CHOICES) if choice not in over})
    target.scheduler.reserve(arriving)
    copy(source, target, arriving)
    target.scheduler.activate(A, [0] * CHOICES)
    target.run()
    for choice in range(CHOICES):
        assert target.tokens(A, choice) == ([] if choice in over else oracle(prompt, SAMPLED, choice)[length:])
    source.run()
    assert [source.tokens(A, choice) for choice in range(CHOICES)] == [
        oracle(prompt, SAMPLED, c) for c in range(CHOICES)
    ]
    assert source.all_free
    assert target.all_free


def test_only_what_is_behind_the_last_full_block_is_computed() -> None:
    source, target = running(PROMPT, LONG, 15), decode()
    arriving = moving(PROMPT, LONG, {0: 14})
    target.scheduler.reserve(arriving)
    assert copy(source, target, arriving) == (len(PROMPT) + 14 - 1) // BLOCK_SIZE
    target.scheduler.activate(A, [0])
    target.step()
    [chunk] = target.plans[-1].chunks
    assert chunk.stop - chunk.start == (len(PROMPT) + 14) - (len(PROMPT) + 13) // BLOCK_SIZE * BLOCK_SIZE


@given(steps=st.integers(0, 4), first=st.integers(8, 10), end=st.integers(10, 18))
def test_tokens_that_the_client_got_meanwhile_are_not_sampled_again(steps: int, first: int, end: int) -> None:
    """Fails when a token is taken twice, or when the next one is sampled without those before it."""
    worker, prompt = decode(), PROMPT
    worker.scheduler.reserve(
        replace(job(A, prompt, LONG, threshold=ALWAYS), output={0: tuple(oracle(prompt, LONG)[:10])})
    )
    for _ in range(steps):
        worker.step()
    sampled = len(worker.tokens(A))
    worker.scheduler.migrating.catch_up(A, [known(0, first, oracle(prompt, LONG)[first:end])])
    worker.run()
    reported = {each.first_index: list(each.token_ids) for each in worker.reported[A][0]}
    behind = [*range(10, 10 + sampled), *range(max(end, 10 + sampled), LONG.max_tokens)]
    assert reported == {index: [oracle(prompt, LONG)[index]] for index in behind}
    assert worker.all_free


def test_tokens_come_while_the_blocks_are_on_their_way() -> None:
    source, target = running(PROMPT, LONG, 12), decode()
    arriving = moving(PROMPT, LONG, {0: 9})
    target.scheduler.reserve(arriving)
    target.scheduler.migrating.catch_up(A, [known(0, 9, oracle(PROMPT, LONG)[9:11])])
    copy(source, target, arriving)
    target.scheduler.activate(A, [0])
    target.run()
    assert target.tokens(A) == oracle(PROMPT, LONG)[11:]


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        (known(0, 11, [1]), RequestError),
        (known(0, 10, [1_000_000]), RequestError),
        (known(0, 10, [1] * 10), RequestError),
        (known(0, 9, [(oracle(PROMPT, LONG)[9] + 1) % 31]), Diverged),
    ],
)
def test_tokens_that_the_request_cannot_have_are_refused(tokens: ChoiceTokens, error: type[Exception]) -> None:
    worker = decode()
    worker.scheduler.reserve(
        replace(job(A, PROMPT, LONG, threshold=ALWAYS), output={0: tuple(oracle(PROMPT, LONG)[:10])})
    )
    with pytest.raises(error):
        worker.scheduler.migrating.catch_up(A, [tokens])
    worker.scheduler.migrating.catch_up(B, [tokens])  # Not here: over already.


def test_a_preempted_choice_has_no_blocks_to_send() -> None:
    worker = running(PROMPT, LONG, 8)
    with pytest.raises(StaleError, match="preempted"):
        worker.scheduler.migrating.hold(A, {0: 15}, 0)
    with pytest.raises(StaleError):
        worker.scheduler.migrating.hold(B, {0: 1}, 0)
    worker.scheduler.migrating.hold(A, {0: 8}, 0)
    with pytest.raises(StaleError, match="already"):
        worker.scheduler.migrating.hold(A, {0: 8}, 0)
    worker.scheduler.abort(A)
    worker.scheduler.check_integrity()
    assert not worker.all_free
    worker.scheduler.migrating.let_go(A)
    assert worker.all_free


def test_a_moving_request_is_not_computed_here_from_its_prompt_on() -> None:
    target = decode()
    target.scheduler.reserve(moving(PROMPT, LONG, {0: 9}))
    target.grant(A)
    with pytest.raises(InvalidTransition):
        target.scheduler.prefill_locally(A)
    target.scheduler.abort(A)
    assert target.all_free


def test_a_request_moves_once_every_choice_has_a_token() -> None:
    with pytest.raises(RequestError, match="2 of 3"):
        decode().scheduler.reserve(replace(moving(PROMPT, SAMPLED, {0: 3}), over=frozenset({1})))


def test_what_exceeds_the_blocks_that_may_be_received_is_computed() -> None:
    source, target = running(PROMPT, LONG, 15), decode(32, max_reserved_share=2 / 32)
    arriving = moving(PROMPT, LONG, {0: 14})
    target.scheduler.reserve(arriving)
    assert copy(source, target, arriving) == 2
    target.scheduler.activate(A, [0])
    target.run()
    assert target.tokens(A) == oracle(PROMPT, LONG)[14:]
    assert target.all_free


def test_choices_that_do_not_fit_together_move_to_an_empty_worker_and_take_turns() -> None:
    source, target = running(PROMPT, SAMPLED, 5), decode(7, max_reserved_share=1.0)
    arriving = moving(PROMPT, SAMPLED, dict.fromkeys(range(CHOICES), 5))
    target.scheduler.reserve(arriving)
    copy(source, target, arriving)
    target.scheduler.activate(A, [0] * CHOICES)
    target.run()
    for choice in range(CHOICES):
        assert target.tokens(A, choice) == oracle(PROMPT, SAMPLED, choice)[5:]
    assert target.all_free


def test_a_choice_stopped_on_the_way_does_not_run() -> None:
    source, target = running(PROMPT, SAMPLED, 6), decode()
    arriving = moving(PROMPT, SAMPLED, dict.fromkeys(range(CHOICES), 5))
    target.scheduler.reserve(arriving)
    copy(source, target, arriving)
    target.scheduler.stop_choice(A, 1)
    target.scheduler.activate(A, [0] * CHOICES)
    target.run()
    assert [len(target.tokens(A, choice)) for choice in range(CHOICES)] == [11, 0, 11]
    assert target.all_free


def test_blocks_of_another_numerics_class_do_not_move() -> None:
    """The worker that they move to would take them for its own."""
    source = decode(40)
    sent = job(A, PROMPT, LONG)
    source.scheduler.reserve(sent)
    grant = source.grant(A)
    write_prompt(source.cache, grant.block_tables[0], grant.num_cached_blocks, PROMPT)
    source.scheduler.migrating.isolate(A, bytes(range(32)))
    source.scheduler.activate(A, first_tokens(sent))
    source.step()
    with pytest.raises(StaleError, match="numerics class"):
        source.scheduler.migrating.hold(A, {0: 1}, 0)
    source.run()
    assert [*first_tokens(sent), *source.tokens(A)] == oracle(PROMPT, LONG)
    target = decode(40)
    target.scheduler.reserve(moving(PROMPT, LONG, {0: 4}))
    target.grant(A)
    with pytest.raises(StaleError, match="numerics class"):
        target.scheduler.migrating.isolate(A, bytes(32))


def test_blocks_of_another_numerics_class_are_found_by_no_other_request() -> None:
    worker, sent = decode(40), job(A, PROMPT, LONG)
    worker.scheduler.reserve(sent)
    grant = worker.grant(A)
    write_prompt(worker.cache, grant.block_tables[0], grant.num_cached_blocks, PROMPT)
    worker.scheduler.migrating.isolate(A, bytes(range(32)))
    worker.scheduler.activate(A, first_tokens(sent))
    worker.run()
    later = [*PROMPT, *oracle(PROMPT, LONG)]
    worker.scheduler.reserve(job(B, later))
    assert worker.grant(B).num_cached_blocks == 0
