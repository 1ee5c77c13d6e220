"""Synthetic workloads."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.cli.bench.datasets import (
    RandomLengths,
    SharedPrefixLengths,
    TokenPool,
    WordPool,
    random_requests,
    shared_prefix_requests,
)

IDS = TokenPool(tuple(range(100, 400)))
WORDS = WordPool(("red", "green", "blue"))


@settings(deadline=None)
@given(
    input_len=st.integers(1, 60),
    output_len=st.integers(1, 60),
    ratio=st.floats(0, 1),
    prefix_len=st.integers(0, 20),
)
def test_lengths_are_within_the_range_and_ids_from_the_pool(
    input_len: int, output_len: int, ratio: float, prefix_len: int
) -> None:
    lengths = RandomLengths(input_len=input_len, output_len=output_len, range_ratio=ratio, prefix_len=prefix_len)
    for request in random_requests(IDS, 20, lengths):
        assert set(request.prompt) <= set(IDS.token_ids)
        own_len = len(request.prompt) - prefix_len
        assert max(1, input_len * (1 - ratio) - 1) <= own_len <= input_len * (1 + ratio)
        assert max(1, output_len * (1 - ratio) - 1) <= request.max_tokens <= output_len * (1 + ratio)


def test_without_a_range_every_prompt_has_exactly_the_requested_length() -> None:
    requests = random_requests(IDS, 5, RandomLengths(input_len=40, output_len=7, prefix_len=8))
    assert {(len(request.prompt), request.max_tokens) for request in requests} == {(48, 7)}


def test_prompts_share_the_prefix_and_nothing_after_it() -> None:
    requests = random_requests(IDS, 10, RandomLengths(input_len=30, output_len=1, prefix_len=16))
    assert len({request.prompt[:16] for request in requests}) == 1
    assert len({request.prompt[16:24] for request in requests}) == 10


def test_prompts_of_words_are_text() -> None:
    [request] = random_requests(WORDS, 1, RandomLengths(input_len=4, output_len=1))
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 4
    assert set(request.prompt.split()) <= set(WORDS.words)


def test_a_seed_gives_the_same_requests_and_another_gives_others() -> None:
    def requests(seed: int) -> list[object]:
        lengths = RandomLengths(input_len=8, output_len=9, range_ratio=0.5)
        shared = SharedPrefixLengths(num_prefixes=2, prefix_len=8, suffix_len=4, output_len=9)
        return [
            *random_requests(IDS, 3, lengths, seed=seed),
            *shared_prefix_requests(IDS, 3, shared, seed=seed),
        ]

    assert requests(1) == requests(1)
    assert requests(1)[:3] != requests(2)[:3]
    assert requests(1)[3:] != requests(2)[3:]


def test_a_larger_count_starts_with_the_same_requests() -> None:
    lengths = RandomLengths(input_len=8, output_len=9, range_ratio=0.5)
    assert random_requests(IDS, 6, lengths)[:3] == random_requests(IDS, 3, lengths)


@pytest.mark.parametrize("pool", [IDS, WORDS], ids=["ids", "words"])
def test_every_prefix_is_used_equally_often(pool: TokenPool | WordPool) -> None:
    requests = shared_prefix_requests(
        pool, 40, SharedPrefixLengths(num_prefixes=4, prefix_len=16, suffix_len=5, output_len=3)
    )
    prompts = [r.prompt.split() if isinstance(r.prompt, str) else r.prompt for r in requests]
    assert {len(prompt) for prompt in prompts} == {21}
    assert Counter(Counter(tuple(prompt[:16]) for prompt in prompts).values()) == {10: 4}


def test_suffixes_differ_and_prefixes_are_shuffled() -> None:
    requests = shared_prefix_requests(
        IDS, 40, SharedPrefixLengths(num_prefixes=2, prefix_len=16, suffix_len=8, output_len=3)
    )
    assert len({request.prompt[16:] for request in requests}) == 40
    first_half = Counter(request.prompt[:16] for request in requests[:20])
    assert len(first_half) == 2
    assert [request.prompt[:16] for request in requests[:4]] != [requests[0].prompt[:16], requests[1].prompt[:16]] * 2
