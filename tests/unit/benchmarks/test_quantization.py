"""The windows and agreements that measure the quality of quantization."""

from __future__ import annotations

import pytest

from benchmarks.quantization import STRIDE, WINDOW, common_prefix, windows


@pytest.mark.parametrize("num_tokens", [WINDOW, WINDOW + 1, WINDOW + STRIDE, 5000, 20_000])
def test_every_token_but_the_first_is_scored_once_with_enough_before_it(num_tokens: int) -> None:
    scored = []
    for start, first, end in windows(num_tokens):
        assert end - start <= WINDOW
        assert start == 0 or first - start == WINDOW - STRIDE
        scored += range(first, end)
    assert scored == list(range(1, num_tokens))


def test_completions_are_the_same_until_the_first_token_that_differs() -> None:
    assert common_prefix([1, 2, 3, 4], [1, 2, 9, 4]) == 2
    assert common_prefix([1, 2], [1, 2]) == 2
    assert common_prefix([5], [6]) == 0
