"""exp and log in double precision as fixed sequences of additions, multiplications and divisions, each rounded once.

numpy's own functions have other last bits on other processors. These have the same everywhere, and so have those of
`kernels/cpu/src/isa/elementary.h`, which compute the same sequences. Both are right to about one unit in the last
place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

#: Largest relative difference between numpy's functions and these, with much to spare.
TOLERANCE = 1e-13

_hex = float.fromhex
_LOG2_E = _hex("0x1.71547652b82fep+0")
#: log(2) in two parts; products of the first with small integers are exact.
_LN2_HIGH, _LN2_LOW = _hex("0x1.62e42fee00000p-1"), _hex("0x1.a39ef35793c76p-33")
#: Adding it rounds to an integer, which is then in the lowest bits.
_SHIFT = _hex("0x1.8p52")
#: (e^x - 1 - x) / x^2 between -log(2)/2 and log(2)/2, from the highest power on. Interpolated at Chebyshev nodes.
_EXP_TERMS = tuple(
    _hex(term)
    for term in (
        "0x1.af38a9b0ec855p-26",
        "0x1.289185613a3d6p-22",
        "0x1.71de0dae63bb3p-19",
        "0x1.a019b90d2ae7ap-16",
        "0x1.a01a01a7c41d5p-13",
        "0x1.6c16c1788bd90p-10",
        "0x1.11111111109b3p-7",
        "0x1.5555555553d63p-5",
        "0x1.5555555555556p-3",
        "0x1.0000000000001p-1",
    )
)
#: The series of 2 artanh(z) / z in squares of z, from the highest power on, halved, without its first term.
_LOG_TERMS = tuple(1 / odd for odd in range(21, 2, -2))
#: About the bits of sqrt(1/2).
_LOG_SPLIT = np.int64(0x3FE6A09E00000000)


def exp(x: Floats) -> Floats:
    """e^x for x <= 0; exactly 1 at 0 and exactly 0 below -700."""
    limited = np.maximum(x, -700.0)
    shifted = limited * _LOG2_E + _SHIFT
    n = shifted - _SHIFT
    f = (limited - n * _LN2_HIGH) - n * _LN2_LOW
    q = np.full_like(f, _EXP_TERMS[0])
    for term in _EXP_TERMS[1:]:
        q = q * f + term
    p = (f * f * q + f) + 1.0
    power = (shifted.view(np.int64) + 1023) << 52
    result: Floats = np.where(x < -700.0, 0.0, p * power.view(np.float64))
    return result


def log(x: Floats) -> Floats:
    """log(x) of positive normal numbers."""
    bits = x.view(np.int64)
    offset = bits - _LOG_SPLIT
    k = (offset >> 52).astype(np.float64)
    m = (bits - (offset >> 52 << 52)).view(np.float64)
    z = (m - 1.0) / (m + 1.0)
    square = z * z
    q = np.full_like(z, _LOG_TERMS[0])
    for term in _LOG_TERMS[1:]:
        q = q * square + term
    tail = 2.0 * z * square * q + k * _LN2_LOW
    result: Floats = (tail + 2.0 * z) + k * _LN2_HIGH
    return result
