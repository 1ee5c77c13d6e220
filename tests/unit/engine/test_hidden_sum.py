"""Sums of hidden states: any chunks give the same bits, and embeddings have a length of 1 or say why not."""

from __future__ import annotations

import numpy as np
import pytest

from pdserve.base.pooling import Pooling
from pdserve.engine.hidden_sum import HiddenSum

_ROWS = np.random.default_rng(3).normal(size=(41, 24)).astype(np.float32)
_PLAIN = Pooling(normalizes=False)


def vector(values: bytes | None) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    assert values is not None
    return np.frombuffer(values, "<f4")


def pooled(rows: np.ndarray[tuple[int, ...], np.dtype[np.float32]], pooling: Pooling, *cuts: int) -> bytes | None:
    total = HiddenSum()
    for chunk in np.split(rows, cuts):
        total.add(chunk)
    return total.embedding(pooling)


@pytest.mark.parametrize("cuts", [(1,), (40,), (3, 3, 20), tuple(range(1, 41))])
def test_chunks_change_no_bit(cuts: tuple[int, ...]) -> None:
    # Sums whose parts cancel show every other order.
    rows = np.concatenate((_ROWS * np.float32(1e12), _ROWS, -_ROWS * np.float32(1e12))).astype(np.float32)
    assert pooled(rows, _PLAIN, *cuts) == pooled(rows, _PLAIN)


def test_an_embedding_is_the_mean_cut_before_it_is_normalized() -> None:
    mean = _ROWS.astype(np.float64).mean(0)
    assert np.allclose(vector(pooled(_ROWS, _PLAIN)), mean, rtol=1e-6)
    cut = vector(pooled(_ROWS, Pooling(dimensions=5)))
    assert np.allclose(cut, mean[:5] / np.linalg.norm(mean[:5]), rtol=1e-6)
    assert len(vector(pooled(_ROWS, Pooling(dimensions=24)))) == 24


def test_small_terms_survive_large_ones() -> None:
    rows = np.array([[2.0**24], [1.0], [-(2.0**24)], [2.0]], np.float32)
    assert vector(pooled(rows, _PLAIN)).tolist() == [0.75]


def test_a_single_row_keeps_its_bits() -> None:
    assert pooled(_ROWS[:1], _PLAIN) == _ROWS[0].tobytes()


@pytest.mark.parametrize("scale", [1e-42, 1e30, 3e38])
def test_very_small_and_very_large_vectors_have_length_1(scale: float) -> None:
    rows = np.sign(_ROWS[:1]) * np.float32(scale)
    assert np.allclose(vector(pooled(rows, Pooling())), np.sign(_ROWS[0]) / np.sqrt(24), rtol=1e-3)


def test_zeros_have_no_direction_and_stay() -> None:
    assert not vector(pooled(_ROWS[:3] * 0, Pooling())).any()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_give_no_embedding(wrong: float) -> None:
    rows = _ROWS.copy()
    rows[2, 7] = wrong
    assert pooled(rows, Pooling()) is None
    assert pooled(rows, Pooling(dimensions=7)) is not None
