"""A request that another worker has continued goes on behind the tokens that its client has, with the same tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decode_svc.request import DecodeJob
from pdserve.base.errors import RequestError
from pdserve.base.sampling import SamplingParams
from tests.unit.decode_svc.decode_worker import ALWAYS, GREEDY, PROMPT, A, B, decode, job, oracle

CHOICES = 3
SAMPLED = SamplingParams(n=CHOICES, seed=7, temperature=0.9, max_tokens=9, ignore_eos=True, repetition_penalty=1.2)


def continued(original: DecodeJob, lengths: list[int], over: frozenset[int] = frozenset()) -> DecodeJob:
    """The job as the next worker gets it, with the first `lengths[i]` tokens of choice i."""
    output = {
        choice: tuple(oracle(list(original.prompt_token_ids), original.params, choice)[:length])
        for choice, length in enumerate(lengths)
        if length and choice not in over
    }
    return replace(original, output=output, over=over)


@given(
    lengths=st.lists(st.integers(0, SAMPLED.max_tokens - 1), min_size=CHOICES, max_size=CHOICES),
    over=st.frozensets(st.integers(0, CHOICES - 1), max_size=CHOICES - 1),
    num_blocks=st.sampled_from([9, 40]),
    is_received=st.booleans(),
    prompt_length=st.integers(1, 10),
)
def test_the_rest_of_each_choice_is_that_of_an_undisturbed_run(
    lengths: list[int], over: frozenset[int], num_blocks: int, is_received: bool, prompt_length: int
) -> None:
    """Fails when a choice is sampled from another position, or without the penalties of what it has."""
    prompt = PROMPT[:prompt_length]
    worker = decode(num_blocks)
    going_on = continued(job(A, prompt, SAMPLED, threshold=0 if is_received else ALWAYS), lengths, over)
    other = job(B, [9, 8, 7], GREEDY, threshold=ALWAYS)
    worker.scheduler.reserve(other)
    if is_received:
        worker.deliver(going_on)
    else:
        worker.scheduler.reserve(going_on)
    worker.run()
    for choice, length in enumerate(lengths):
        # With received KV, the client has first tokens from the prefill worker.
        first = max(length, 1) if is_received else length
        expected = [] if choice in over else oracle(prompt, SAMPLED, choice)[first:]
        assert worker.tokens(A, choice) == expected
    assert worker.tokens(B) == oracle([9, 8, 7])
    assert worker.all_free


def test_the_tokens_are_computed_in_chunks_and_not_one_by_one() -> None:
    worker = decode()
    params = replace(GREEDY, max_tokens=30)
    worker.scheduler.reserve(continued(job(A, PROMPT, params, threshold=ALWAYS), [25]))
    steps = len(worker.run())
    assert worker.tokens(A) == oracle(PROMPT, params)[25:]
    assert steps <= 2 + (30 - 25)


@pytest.mark.parametrize(
    ("output", "over", "fault"),
    [
        ({3: (1,)}, (), "only from 0 to 2"),
        ({0: (1,)}, (0,), "each once"),
        ({}, (0, 1, 2), "All choices are over"),
        ({0: ()}, (), "0 tokens of choice 0"),
        ({0: (1,) * SAMPLED.max_tokens}, (), "1 to 8"),
        ({0: (1_000_000,)}, (), "output"),
    ],
)
def test_output_that_the_request_cannot_have_is_refused(
    output: dict[int, tuple[int, ...]], over: tuple[int, ...], fault: str
) -> None:
    worker = decode()
    broken = replace(job(A, PROMPT, SAMPLED, threshold=ALWAYS), output=output, over=frozenset(over))
    with pytest.raises(RequestError, match=fault):
        worker.scheduler.reserve(broken)
    assert worker.all_free
    assert not worker.scheduler.has_work()


def test_a_request_ends_whose_choices_were_all_stopped_before_its_transfer_was_given_up() -> None:
    worker = decode()
    worker.scheduler.reserve(continued(job(A, PROMPT, GREEDY), [3]))
    worker.grant(A)
    worker.scheduler.stop_choice(A, 0)
    worker.scheduler.prefill_locally(A)
    worker.run()
    assert not worker.tokens(A)
    assert worker.all_free


def test_so_does_one_without_output() -> None:
    worker = decode()
    worker.scheduler.reserve(job(A, PROMPT[:2], GREEDY))
    worker.grant(A)
    worker.scheduler.stop_choice(A, 0)
    worker.scheduler.prefill_locally(A)
    worker.run()
    assert worker.all_free
