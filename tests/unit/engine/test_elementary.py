"""exp and log of fixed sequences of operations: exact bits, special values and accuracy."""

from __future__ import annotations

import math

import numpy as np

from pdserve.engine import elementary


def test_the_bits_are_the_same_on_every_processor() -> None:
    x = np.array([-1e-9, -0.3, -1.0, -7.77, -22.2, -699.5])
    assert [value.hex() for value in elementary.exp(x).tolist()] == EXP_BITS
    y = np.array([1.2e-10, 0.5, 0.999999999, 3.0, 22.5, 151_936.0])
    assert [value.hex() for value in elementary.log(y).tolist()] == LOG_BITS


def test_exp_is_1_at_0_and_0_far_below() -> None:
    assert elementary.exp(np.array([0.0, -0.0, -700.1, -1e300, -math.inf])).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_both_are_right_to_about_the_last_bit() -> None:
    generator = np.random.default_rng(1)
    x = -generator.exponential(8.0, 20_000)
    assert np.abs(elementary.exp(x) / np.exp(x) - 1).max() < 1e-15
    y = np.exp(generator.uniform(-23, 12, 20_000))
    assert np.abs(elementary.log(y) - np.log(y)).max() < 4e-15
    u = generator.uniform(0, 1, 20_000)
    assert np.abs(elementary.log(u) / np.log(u) - 1).max() < 1e-15


EXP_BITS = [
    "0x1.fffffff768fa1p-1",
    "0x1.7b4c869c37c05p-1",
    "0x1.78b56362cef38p-2",
    "0x1.bab902c420358p-12",
    "0x1.f637d29e8a87ap-33",
    "0x1.c89c2e339b392p-1010",
]
LOG_BITS = [
    "-0x1.6d7f18a7ee12ep+4",
    "-0x1.62e42fefa39efp-1",
    "-0x1.12e0be024e4bcp-30",
    "0x1.193ea7aad030bp+0",
    "0x1.8e87ab6e53b28p+1",
    "0x1.7dcc82aefe0d0p+3",
]
