"""Products in Triton's interpreter: one order of sums on every machine, so that a row's bits are its own."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support import interpreted_products
from tests.support.devices import HAS_GPU, needs_triton


def test_terms_are_added_in_the_order_of_the_depth_each_rounded() -> None:
    rng = np.random.default_rng(0)
    a, b, d = (rng.standard_normal(shape, dtype=np.float32) for shape in ((3, 50), (50, 7), (3, 7)))
    product = interpreted_products.dot(a, b, d)
    for row in range(3):
        for column in range(7):
            total = d[row, column]
            for k in range(50):
                total = np.float32(total + np.float32(a[row, k] * b[k, column]))
            assert product[row, column] == total


def test_a_row_has_the_same_bits_alone_at_any_position_and_in_any_layout() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((64, 96), dtype=np.float32), rng.standard_normal((96, 33), dtype=np.float32)
    zeros = np.zeros((64, 33), np.float32)
    product = interpreted_products.dot(a, b, zeros)
    assert np.array_equal(interpreted_products.dot(a[::-1], np.asfortranarray(b), zeros)[::-1], product)
    for row in range(64):
        assert np.array_equal(interpreted_products.dot(a[row : row + 1], b, zeros[:1])[0], product[row])


@needs_triton
@pytest.mark.skipif(HAS_GPU, reason="kernels run on the GPU")
def test_the_interpreter_uses_them() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    assert InterpreterBuilder.create_dot.__module__ == interpreted_products.__name__
