"""Philox and the Gumbel noise made from it: published values, distribution and bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pdserve.engine.philox import MAX_GUMBEL, MIN_GUMBEL, GumbelNoise, gumbel, min_word, philox4x32


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_known_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: str
) -> None:
    even, odd, keys = (np.array([[word] for word in words], np.uint64) for words in (counter[::2], counter[1::2], key))
    even, odd = philox4x32(even, odd, keys)
    assert " ".join(f"{int(word):08x}" for word in (even[0, 0], odd[0, 0], even[1, 0], odd[1, 0])) == words


def test_a_tokens_noise_does_not_depend_on_the_tokens_requested_with_it() -> None:
    for key in [(5, 0, 9), (-(2**63), 1, 9), (2**63 - 1, 127, 8000)]:
        noise = GumbelNoise(*key)
        whole = gumbel(noise.words_of_vocabulary(1001))
        for ids in (np.arange(1000, -1, -3), np.array([1000, 0, 401]), np.array([3])):
            assert (noise.of_tokens(ids) == whole[ids]).all()


def test_noise_has_the_mean_and_variance_of_a_gumbel_variable() -> None:
    noise = np.stack([gumbel(GumbelNoise(1, 0, position).words_of_vocabulary(20_000)) for position in range(50)])
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.01)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_noise_is_within_its_bounds_and_words_below_min_word_have_less() -> None:
    assert gumbel(np.array([0, 2**32 - 1], np.uint64)).tolist() == [
        pytest.approx(MIN_GUMBEL, rel=1e-12),
        pytest.approx(MAX_GUMBEL, rel=1e-9),
    ]
    for noise in (-3.2, -1.0, 0.0, 6.0, 12.0, 22.0):
        word = min_word(noise)
        assert word == 0 or gumbel(np.array([word - 1], np.uint64))[0] < noise
